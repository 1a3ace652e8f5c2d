"""The records of small state that this rank keeps: its own and its ward's, of the last two steps.

Contract: the record of step k is this rank's RNG, loader position and buffers as they are at the vote of k; its tail is what
code after the vote changed until step k + 1 begins, empty if nothing. Record plus tail is the small state before k + 1.
"""

from __future__ import annotations

import dataclasses

import msgspec

#: Steps kept: a rank may be lost while its buddy is one step ahead of it.
GENERATIONS = 2


class RecordReply(msgspec.Struct, frozen=True, kw_only=True):
    """A record on its way to a joiner. `tail` None: the rank was lost before it could say what its tail changed."""

    step: int
    record: bytes
    tail: bytes | None


@dataclasses.dataclass(slots=True)
class _Kept:
    record: bytes
    tail: bytes | None = None


class RecordShelf:
    """Records of one rank, by step. The caller serialises the calls."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def put(self, step: int, record: bytes) -> None:
        self._kept[step] = _Kept(record)
        for old in [s for s in self._kept if s <= step - GENERATIONS]:
            del self._kept[old]

    def put_tail(self, step: int, tail: bytes) -> None:
        kept = self._kept.get(step)
        if kept is not None:
            kept.tail = tail

    def has(self, step: int) -> bool:
        return step in self._kept

    def tail(self, step: int) -> bytes | None:
        kept = self._kept.get(step)
        return None if kept is None else kept.tail

    def reply(self, step: int) -> RecordReply | None:
        """The record of `step` as a joiner gets it, or None if it is not here."""
        kept = self._kept.get(step)
        return None if kept is None else RecordReply(step=step, record=kept.record, tail=kept.tail)
