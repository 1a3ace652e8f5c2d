"""The joiner moves a state, or its share of one: over the agreed transport, and what that leaves over the spare one.

Contract: `move` returns once every chunk has landed, whoever moved it, or raises TransferFailed; it may be called again for
chunks that turned out to be damaged. `why` tells what happened in words for people.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from tmd_worker.handoff.agreement import Agreement
from tmd_worker.handoff.transfer import Chunk, JoinerEnd, Memory, Region, SharedChunks, TransferFailed, Work

#: The agreed transport and the dialing of the spare get this share of the time in which the source must hear something, so that
#: the spare's bytes still move in time.
_SHARE = 1 / 3
_LATE = "it was late: the other sources had nothing to do but to wait for its last chunks, and took them over"

_log = logging.getLogger(__name__)


class Puller:
    """One handoff with one source, on the joiner."""

    def __init__(
        self,
        agreement: Agreement,
        exports: Mapping[str, Sequence[Region]],
        memory: Sequence[Memory],
        landed: Callable[[Chunk], None],
        timeout_s: float,
    ) -> None:
        """`exports`: by transport; one that is not there could not export. `landed`: see Work. `timeout_s`: how long the source
        waits for a word while nothing lands."""
        self._agreement = agreement
        self._exports = exports
        self._memory = memory
        self._landed = landed
        self._timeout_s = timeout_s
        self._broken = False
        self._late = False
        #: Guards the counters below: chunks land in several threads.
        self._lock = threading.Lock()
        self.spare_name = agreement.spare_name
        self._spare_connected = agreement.end is agreement.spare
        self.why = agreement.why
        self.bytes_by_transport: collections.Counter[str] = collections.Counter()
        #: Numbers of the chunks that came from this source.
        self.brought: set[int] = set()

    def move(self, chunks: Sequence[Chunk] | SharedChunks) -> None:
        agreement = self._agreement
        work = Work(chunks, self._count, self._give_up)
        if not self._broken:
            self._under_way = agreement.transport
            try:
                self._read(agreement.transport, agreement.end, work)
                return
            except TransferFailed as error:
                if self._late or agreement.end is agreement.spare:
                    raise
                self._broken = True
                _log.warning("a handoff goes on over %s: %s", agreement.spare_name, error)
                self.why += f"; {error}; the rest, {work.missing} chunks, went over {agreement.spare_name}"
        if not self._spare_connected:
            agreement.spare.connect(agreement.spare_words, self._timeout_s * _SHARE)
            self._spare_connected = True
        self._under_way = agreement.spare_name
        self._read(agreement.spare_name, agreement.spare, work)

    def distrust(self) -> None:
        """What the agreed transport brought was damaged, perhaps by a stale registration of memory: the spare takes over."""
        self._broken = True

    def _read(self, name: str, end: JoinerEnd, work: Work) -> None:
        if name not in self._exports:
            raise TransferFailed(f"{name}: the source could not export its memory")
        timeout_s = self._timeout_s if end is self._agreement.spare else self._timeout_s * _SHARE
        try:
            end.read(self._exports[name], self._memory, work, timeout_s)
        except TransferFailed as error:
            if self._late:
                raise TransferFailed(_LATE) from error
            raise
        if self._late:
            raise TransferFailed(_LATE)
        if work.missing:
            raise TransferFailed(f"{name}: {work.missing} chunks were not moved")

    def _give_up(self) -> None:
        """From the thread of another source, which has nothing left to do but what is under way here."""
        self._late = True
        self._agreement.close()

    def _count(self, chunk: Chunk) -> None:
        size = chunk.size_bytes
        with self._lock:
            self.bytes_by_transport[self._under_way] += size
            self.brought.add(chunk.number)
        self._landed(chunk)
