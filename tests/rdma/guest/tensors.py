"""Stand-ins for a role's tensors: entries of given sizes in one block of memory, with guarded gaps between them."""

from __future__ import annotations

import ctypes
import mmap
import random
import zlib
from collections.abc import Sequence

from tmd_worker.handoff.transfer import Memory

GUARD = 0xA5
_BLOCK_BYTES = 1 << 20


class Tensors:
    """`gap_bytes`: between entries; an odd one leaves them unaligned. All bytes are GUARD at first."""

    def __init__(self, sizes: Sequence[int], gap_bytes: int) -> None:
        self.sizes = list(sizes)
        self._starts = []
        place = gap_bytes
        for size in sizes:
            self._starts.append(place)
            place += size + gap_bytes
        self._total = max(place, 1)
        self._map = mmap.mmap(-1, self._total)
        self._map[:] = bytes([GUARD]) * self._total
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = [Memory(address + start, size) for start, size in zip(self._starts, sizes, strict=True)]

    def fill(self, seed: int) -> None:
        """With bytes that differ from entry to entry and from MiB to MiB."""
        block = random.Random(seed).randbytes(_BLOCK_BYTES)
        for entry, (start, size) in enumerate(zip(self._starts, self.sizes, strict=True)):
            for offset in range(0, size, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, size - offset)
                mark = f"{seed}.{entry}.{offset}.".encode()[:length]
                self._map[start + offset : start + offset + length] = mark + block[: length - len(mark)]

    def checksums(self) -> list[int]:
        with memoryview(self._map) as view:
            return [zlib.crc32(view[start : start + size]) for start, size in zip(self._starts, self.sizes, strict=True)]

    def guarded(self) -> bool:
        """Whether nothing was written beside the entries."""
        place = 0
        for start, size in [*zip(self._starts, self.sizes, strict=True), (self._total, 0)]:
            if self._map[place:start].count(bytes([GUARD])) != start - place:
                return False
            place = start + size
        return True

    def untouched(self) -> bool:
        """Whether every byte is as it was made."""
        return self._map[:].count(bytes([GUARD])) == self._total
