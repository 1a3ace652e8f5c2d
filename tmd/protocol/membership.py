"""Who is in a job at one epoch, and what a planned migration would make of it. Plain values, no behaviour beyond look-ups."""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a rank and where its listener is."""

    incarnation: str
    node: str
    host: str
    port: int


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one epoch: global rank -> member. Complete: it has an entry for every rank of the job."""

    epoch: int
    members: dict[int, Member]

    def rank_of(self, incarnation: str) -> int | None:
        """The rank that this incarnation holds in this epoch, or None."""
        for rank, member in self.members.items():
            if member.incarnation == incarnation:
                return rank
        return None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned migration as every rank sees it: who leaves at `base_epoch`, and the table of the epoch after the flip.

    The table with the leaver back (base_epoch + 2) is made by the daemon only if it is needed.
    """

    #: Unique within the job and rising; 0 means "no plan".
    plan_id: int
    migration_id: str
    base_epoch: int
    #: Leaving rank -> its incarnation in `base_epoch`.
    leavers: dict[int, str]
    #: Leaving rank -> where its listener is: the joiner takes its state from there.
    sources: dict[int, Member] = {}
    #: The table after the flip. Its epoch is base_epoch + 1, or more if numbers were given out meanwhile.
    successor: Membership


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a joiner takes the state of its role from in an unplanned recovery."""

    #: A living member with the same parameters and optimizer state, or None at a start from nothing.
    replica_rank: int | None
    #: The buddy that holds the lost rank's record of small state, or None if it was lost as well.
    record_rank: int | None
    #: Further ones like `replica_rank`: the joiner draws parts from all of them (1.3).
    other_replicas: tuple[int, ...] = ()


class Install(msgspec.Struct, frozen=True, kw_only=True):
    """Open the links of this table; who joins takes its state first. Nobody runs in it before `Directive.live_epoch` says so."""

    membership: Membership
    #: The step that every member is to run first in this epoch.
    target_step: int
    #: Rank -> source, for members that do not hold their role's state yet.
    joining: dict[int, Source]
    #: True for the very first epoch: nobody has any state, links are opened and `main` builds live.
    fresh: bool = False


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The final word about the undecided step of every epoch up to and including `epoch`."""

    epoch: int
    #: A rank whose vote ended unknown at target_step - 1 applies it; at target_step it discards.
    target_step: int


def buddy_of(rank: int, world_size: int, nproc_per_node: int) -> int:
    """The rank that keeps `rank`'s record of small state: the same slot on the next node, or the next rank on a single node.

    With one rank alone it is the rank itself (there is nobody else to ask).
    """
    if world_size == 1:
        return rank
    stride = nproc_per_node if world_size > nproc_per_node else 1
    return (rank + stride) % world_size


def ward_of(rank: int, world_size: int, nproc_per_node: int) -> int:
    """The rank whose record `rank` keeps: the inverse of `buddy_of`."""
    if world_size == 1:
        return rank
    stride = nproc_per_node if world_size > nproc_per_node else 1
    return (rank - stride) % world_size
