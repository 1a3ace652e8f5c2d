"""Links between ranks: pairs of ends with delay, opened by two sides that name the same epoch and incarnations.

Contract: frames of one direction arrive in order; a closed end is seen by the other after a delay, orderly (STOP sent first) or
not; nothing that was sent after a close arrives. A side that has given up the epoch refuses, one that is not there yet is
waited for until the deadline.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from tmd.protocol.membership import Membership, buddy_of, ward_of
from tmd_worker.core.ballot import tree_children, tree_parent

if TYPE_CHECKING:
    from tests.simulator.rank import SimRank
    from tests.simulator.world import World

#: (kind, rank of the peer): "ring" carries gradients, "tree" the vote, "buddy" the records of small state.
Route = tuple[str, int]


def neighbours(rank: int, world_size: int, nproc_per_node: int) -> set[Route]:
    """Every link that this rank has in a table of that size."""
    routes = {("ring", (rank + 1) % world_size), ("ring", (rank - 1) % world_size)}
    parent = tree_parent(rank)
    if parent is not None:
        routes.add(("tree", parent))
    routes.update(("tree", child) for child in tree_children(rank, world_size))
    routes.add(("buddy", buddy_of(rank, world_size, nproc_per_node)))
    routes.add(("buddy", ward_of(rank, world_size, nproc_per_node)))
    return routes


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What travels on a link."""

    kind: str
    epoch: int
    step: int
    rank: int
    incarnation: str
    value: Any


class End:
    """One side of a link, owned by one process."""

    __slots__ = ("_arrival", "broken", "closed", "epoch", "inbox", "mate", "owner", "peer", "route", "use")

    def __init__(self, owner: SimRank, route: Route, epoch: int, use: str) -> None:
        self.owner = owner
        self.route = route
        self.peer = route[1]
        self.epoch = epoch
        #: "opening", "live", "staged" or "retiring".
        self.use = use
        self.inbox: collections.deque[Frame] = collections.deque()
        self.closed = False
        #: The end of the link has been seen.
        self.broken = False
        self.mate: End = self
        self._arrival = 0.0

    def send(self, frame: Frame) -> None:
        if self.closed or self.mate.closed:
            return
        world = self.owner.world
        self._arrival = max(self._arrival, world.now + world.link_delay())
        world.after(self._arrival - world.now, self.mate.owner, self.mate.receive, frame)

    def receive(self, frame: Frame) -> None:
        if not self.closed and not self.broken:
            self.inbox.append(frame)
            self.owner.frame_arrived(self)

    def close(self, *, orderly: bool, linger_s: float = 0.0) -> None:
        """`linger_s`: the kernel closes a killed process's sockets only after freeing its memory."""
        if self.closed:
            return
        self.closed = True
        world = self.owner.world
        self._arrival = max(self._arrival, world.now + world.link_delay() + linger_s)
        world.after(self._arrival - world.now, self.mate.owner, self.mate.see_end, orderly)

    def see_end(self, orderly: bool) -> None:
        if not self.closed and not self.broken:
            self.broken = True
            self.owner.link_ended(self, orderly=orderly)


class Opening:
    """The links that one process opens for one table, in the background."""

    def __init__(self, owner: SimRank, members: Membership, routes: set[Route], use: str) -> None:
        self.owner = owner
        self.epoch = members.epoch
        self.members = members
        self.use = use
        self.missing = set(routes)
        self.ends: dict[Route, End] = {}
        self.over = False
        #: The core has been told, or is about to be.
        self.reported = False

    def cancel(self) -> None:
        """Closes what is open already."""
        self.over = True
        for end in self.ends.values():
            end.close(orderly=True)

    def established(self, end: End) -> None:
        if self.over or end.closed:
            end.close(orderly=True)
            return
        self.ends[end.route] = end
        self.missing.discard(end.route)
        if end.broken:
            self.owner.opening_failed(self, f"the link to rank {end.peer} broke at once")
        elif not self.missing:
            self.owner.opening_done(self)

    def unreached(self) -> int:
        """The rank that this process dials and that takes no connections, -1 for none. They are dialed in order."""
        rank = self.members.rank_of(self.owner.incarnation)
        assert rank is not None
        dialed = sorted(peer for _, peer in self.missing if peer < rank)
        return next((peer for peer in dialed if self.owner.world.is_deaf(self.members.members[peer].incarnation)), -1)

    def refused(self, peer: int) -> None:
        if not self.over and self.missing:
            self.owner.opening_failed(self, f"rank {peer} is past epoch {self.epoch}")

    def deadline(self) -> None:
        if not self.over and self.missing:
            unreached = self.unreached()
            if unreached >= 0:  # either may be taken for the one at fault
                world = self.owner.world
                world.checks.touched([self.owner, world.processes[self.members.members[unreached].incarnation]])
            self.owner.opening_failed(self, f"no link to {sorted(self.missing)} in time", unreached)


#: (epoch, kind, incarnation with the lower rank, incarnation with the higher rank).
_Offer = tuple[int, str, str, str]


class Switchboard:
    """Brings the two sides of each link together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._offers: dict[_Offer, tuple[Opening, Route]] = {}

    def open(self, opening: Opening, deadline_s: float) -> None:
        world, owner = self._world, opening.owner
        for route in sorted(opening.missing):
            self._offer(opening, route)
        if opening.missing:
            world.after(deadline_s, owner, opening.deadline)
        else:
            world.after(0.0, owner, owner.opening_done, opening)

    def _offer(self, opening: Opening, route: Route) -> None:
        world, owner = self._world, opening.owner
        kind, peer = route
        rank = opening.members.rank_of(owner.incarnation)
        mate = opening.members.members[peer].incarnation
        pair = (owner.incarnation, mate) if rank is not None and rank < peer else (mate, owner.incarnation)
        key = (opening.epoch, kind, *pair)
        if world.is_deaf(pair[0]):
            return  # who has the higher rank dials in vain, and the other waits in vain
        theirs = self._offers.pop(key, None)
        if theirs is not None and not theirs[0].over and theirs[0].owner.alive and theirs[0].owner is not owner:
            self._connect(opening, route, *theirs)
            return
        process = world.processes.get(mate)
        if process is not None and process.alive and process.core.poisoned_epoch >= opening.epoch:
            world.after(2 * world.link_delay(), owner, opening.refused, peer)
        self._offers[key] = (opening, route)

    def _connect(self, ours: Opening, our_route: Route, theirs: Opening, their_route: Route) -> None:
        world = self._world
        our_end = End(ours.owner, our_route, ours.epoch, ours.use)
        their_end = End(theirs.owner, their_route, theirs.epoch, theirs.use)
        our_end.mate, their_end.mate = their_end, our_end
        world.pairs.append(our_end)
        for opening, end in ((ours, our_end), (theirs, their_end)):
            end.owner.ends.append(end)
            world.after(2 * world.link_delay(), end.owner, opening.established, end)

    def refuse_below(self, process: SimRank, epoch: int) -> None:
        """This process has given up every epoch up to this one: whoever waits for it there is told."""
        world = self._world
        for key in [key for key in self._offers if key[0] <= epoch and process.incarnation in key[2:]]:
            opening, route = self._offers.pop(key)
            if opening.owner is not process and not opening.over:
                world.after(2 * world.link_delay(), opening.owner, opening.refused, route[1])
