"""What travels in the commit vote, and how two ballots become one. A vote completes with yes or breaks: there is no "no"."""

from __future__ import annotations

import dataclasses
import struct

_LAYOUT = struct.Struct("!qqqqqq?xxxI")
BALLOT_BYTES = _LAYOUT.size


@dataclasses.dataclass(frozen=True, slots=True)
class Ballot:
    """One rank's ballot, or the combination of several. Plan 0 means "I know of no plan"."""

    epoch_min: int
    epoch_max: int
    step_min: int
    step_max: int
    plan_min: int
    plan_max: int
    #: Every rank has the links of the plan's successor table staged.
    staged: bool
    #: How many leavers have raised their flag.
    ready_leavers: int

    @classmethod
    def single(cls, *, epoch: int, step: int, plan: int = 0, staged: bool = False, ready: bool = False) -> Ballot:
        return cls(epoch, epoch, step, step, plan, plan, staged, int(ready))

    def combine(self, other: Ballot) -> Ballot:
        """Associative and commutative, so the shape of the tree does not matter."""
        return Ballot(
            min(self.epoch_min, other.epoch_min),
            max(self.epoch_max, other.epoch_max),
            min(self.step_min, other.step_min),
            max(self.step_max, other.step_max),
            min(self.plan_min, other.plan_min),
            max(self.plan_max, other.plan_max),
            self.staged and other.staged,
            self.ready_leavers + other.ready_leavers,
        )

    def agrees(self) -> bool:
        """True if all ranks voted on the same step in the same epoch; anything else is a broken invariant."""
        return self.epoch_min == self.epoch_max and self.step_min == self.step_max

    def flips(self, plan_id: int, leavers: int) -> bool:
        """True if this combined ballot decides the flip of `plan_id`, which has that many leavers."""
        return plan_id > 0 and self.plan_min == self.plan_max == plan_id and self.staged and self.ready_leavers == leavers

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.epoch_min,
            self.epoch_max,
            self.step_min,
            self.step_max,
            self.plan_min,
            self.plan_max,
            self.staged,
            self.ready_leavers,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Ballot:
        """Raises ValueError on a wrong length."""
        try:
            return cls(*_LAYOUT.unpack(data))
        except struct.error as error:
            raise ValueError(f"ballot of {len(data)} bytes, expected {BALLOT_BYTES}") from error


def tree_parent(rank: int) -> int | None:
    """Parent in the binary tree that the vote runs on, None for the root."""
    return (rank - 1) // 2 if rank else None


def tree_children(rank: int, size: int) -> list[int]:
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
