"""What each piece of a handoff should hold: its xxh3_128, computed from memory at either end.

End to end: the source computes from the memory that it exported while others read it, the joiner from the memory that was
written, in the thread that has just received a chunk. The source's come in one frame over the control channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import xxhash

from tmd_worker.handoff.transfer import Chunk, Memory
from tmd_worker.handoff.wire import view_of

DIGEST_BYTES = 16


class Digests:
    """Of one end's memory."""

    def __init__(self, memory: Sequence[Memory], chunks: Sequence[Chunk]) -> None:
        self._views = [view_of(part) for part in memory]
        self._chunks = chunks
        #: Of each chunk, how many pieces come before it.
        self._before = list(itertools.accumulate((len(chunk.pieces) for chunk in chunks), initial=0))
        self._digests = [b""] * self._before[-1]

    def take(self, chunk: Chunk) -> None:
        """It lies in memory now. From any thread."""
        for number, piece in enumerate(chunk.pieces, self._before[chunk.number]):
            view = self._views[piece.entry][piece.offset : piece.offset + piece.size_bytes]
            self._digests[number] = xxhash.xxh3_128_digest(view)

    def take_all(self, taken: Callable[[], None] = lambda: None) -> bytes:
        """`taken` is called after each chunk."""
        for chunk in self._chunks:
            self.take(chunk)
            taken()
        return b"".join(self._digests)

    def differing(self, theirs: bytes) -> tuple[list[Chunk], list[int]]:
        """Chunks that are not as the source said, and their entries. Raises ValueError if it spoke of another state."""
        if len(theirs) != DIGEST_BYTES * len(self._digests):
            raise ValueError(f"{len(theirs)} bytes of digests came for {len(self._digests)} pieces")
        chunks, entries = [], []
        for chunk in self._chunks:
            wrong = [
                piece.entry
                for number, piece in enumerate(chunk.pieces, self._before[chunk.number])
                if theirs[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] != self._digests[number]
            ]
            if wrong:
                chunks.append(chunk)
                entries += wrong
        return chunks, list(dict.fromkeys(entries))
