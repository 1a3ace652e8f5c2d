"""Chunks that wait for two sources: on one machine the first may have brought everything before the second is scheduled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tmd_worker.handoff.transfer import PATIENCE_S, Chunk, SharedChunks

#: After it the sources that are there go on alone.
MEET_S = 20.0


class MeetingChunks(SharedChunks):
    """Dealt once two readers ask for them, as if the wire were slow beside the dialing."""

    def __init__(self, chunks: Sequence[Chunk], patience_s: float = PATIENCE_S) -> None:
        super().__init__(chunks, patience_s)
        self._asking: set[int] = set()
        self._met = threading.Condition()

    def take(self, reader: int, *, wait: bool) -> Chunk | None:
        with self._met:
            self._asking.add(reader)
            self._met.notify_all()
            self._met.wait_for(lambda: len(self._asking) > 1, MEET_S)
        return super().take(reader, wait=wait)
