"""What is handed over, described: every tensor by name, type, shape and size, and the small structured rest."""

from __future__ import annotations

import msgspec


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a state. `stride` is in elements, of memory that is dense; `device` is "cpu" or the accelerator's kind."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int
    device: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state as it is before `step`. Digests travel after the bytes, see handoff."""

    #: The step that comes next, and the epoch in which the source ran last.
    step: int
    epoch: int
    entries: tuple[TensorEntry, ...]
    #: Everything that is not a tensor entry, encoded by tree.encode.
    structure: bytes
    #: The source's own record of the last vote, and what has changed since (empty: nothing).
    record: bytes
    tail: bytes = b""

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)
