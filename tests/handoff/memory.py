"""Memory with an address, as tensors have it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tmd_worker.handoff.transfer import Memory


class Buffers:
    """Some pieces of memory with these contents."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._kept = [(ctypes.c_char * max(len(content), 1)).from_buffer(bytearray(content or b"\0")) for content in contents]
        self.memory = [Memory(ctypes.addressof(kept), len(content)) for kept, content in zip(self._kept, contents, strict=True)]

    @classmethod
    def empty(cls, sizes: Sequence[int]) -> Buffers:
        return cls([bytes(size) for size in sizes])

    def contents(self) -> list[bytes]:
        return [ctypes.string_at(part.address, part.size_bytes) for part in self.memory]
