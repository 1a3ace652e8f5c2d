"""Opens the links of groups: of all for an epoch or a plan, of one that is made later, of two members who want to talk.

Contract: what is opened ends with its epoch or its plan, whenever that comes, and so does the opening. A group that a member was
found to have left is left here as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from tmd_worker.discard import StepDiscarded
from tmd_worker.transport.dialing import Cancelled, GroupGone, LinkError
from tmd_worker.transport.ending import Ending
from tmd_worker.transport.epochs import LinkSet
from tmd_worker.transport.events import FabricEvents
from tmd_worker.transport.group import Group
from tmd_worker.transport.holding import Holding
from tmd_worker.transport.leaving import Departures
from tmd_worker.transport.link import Link
from tmd_worker.transport.opening import Attempt, Attempts, Opener
from tmd_worker.transport.preparing import Preparer
from tmd_worker.transport.watcher import Watcher

#: Opening the links of a group that is made while an epoch is live may take this long.
LATE_GROUP_S = 60.0


class Linking:
    """For one process."""

    def __init__(
        self,
        holding: Holding,
        *,
        attempts: Attempts,
        opener: Opener,
        preparer: Preparer,
        departures: Departures,
        watcher: Watcher,
        ending: Ending,
        events: FabricEvents,
    ) -> None:
        self._lock = holding.lock
        self._groups = holding.groups
        self._standing = holding.standing
        self._tables = holding.tables
        self._labels = holding.labels
        self._attempts = attempts
        self._opener = opener
        self._preparer = preparer
        self._departures = departures
        self._watcher = watcher
        self._ending = ending
        self._events = events

    def open(self, links: LinkSet, plan_id: int, deadline_s: float) -> int:
        """Opens the links of every group, also of those that are made meanwhile, and keeps the set. Returns how many.

        Raises LinkError or Cancelled.
        """
        self._tables.expect(links.membership)
        attempt = Attempt(links.epoch, deadline_s)
        count = 0
        with self._attempting(attempt, plan_id):
            try:
                while True:
                    with self._lock:
                        missing = [group for group in self._groups.values() if group.name not in links.links]
                        if not missing:
                            attempt.check()
                            self._standing.put(links, plan_id)
                            self._departures.absorb(links)
                            break
                    count += links.open_for(missing, self._opener, attempt)
                    links.prepare_for(missing, self._preparer, attempt)
            except BaseException:
                self._ending.end(links.remains())
                raise
        return count

    def add(self, group: Group, name: str, rank: int) -> None:
        """A new group, which PyTorch calls `name`. While an epoch is live its links are opened now. Raises StepDiscarded when
        poisoned. `rank`: of this process, -1 if it has none yet."""
        with self._lock:
            if rank >= 0:
                group.take_role(rank)
            group.name = self._labels.make(name)
            self._groups[group.name] = group
            targets = self._standing.usable()
        try:
            for links in targets:
                self._add_to(links, group)
        except (StepDiscarded, LinkError):
            self._departures.depart(group, group.ranks[group.rank])  # PyTorch has no such group now
            raise

    def _add_to(self, links: LinkSet, group: Group) -> None:
        attempt = Attempt(links.epoch, LATE_GROUP_S)
        discarded = StepDiscarded(f"a link broke while group {group.name} was being made")
        try:
            with self._attempting(attempt):
                links.open_for([group], self._opener, attempt)
                links.prepare_for([group], self._preparer, attempt)
        except LinkError as error:
            self.failed(links.epoch, error)
            if self._is_closed(links.epoch):
                raise discarded from None
            raise
        opened = links.links[group.name]
        with self._lock:
            closed = self._is_closed(links.epoch)
            if links is self._standing.live:
                group.table = group.table_of(links.epoch, opened, links.inners.get(group.name))
            if not closed:
                self._departures.absorb(links)
                for link in opened.values():
                    self._watcher.add(link)
        if closed:
            self._ending.end(links.remains_of(group))
            raise discarded

    def open_pair(self, group: Group, label: str, peer: int, attempt: Attempt, *, shares: bool) -> Link:
        """A link between two members of a group, for send/recv or a `direct` one. Raises GroupGone, LinkError or Cancelled."""
        with self._lock:
            live = self._standing.live
        if live is None or live.epoch != attempt.epoch:
            raise Cancelled(f"epoch {attempt.epoch} is closed")
        links = LinkSet(live.membership, live.rank, only=frozenset({peer}))
        pair = Group(label, group.ranks, group.timeout_s, lambda _, size: set(range(size)), shares=shares)
        pair.take_role(live.rank)
        with self._attempting(attempt):
            links.open_for([pair], self._opener, attempt)
        if links.gone:
            raise GroupGone(group.name, links.gone[group.name])
        return links.links[label][peer]

    def failed(self, epoch: int, error: LinkError) -> None:
        """Tells the runtime that a link of this epoch could not be opened, unless it is not wanted any more."""
        if not isinstance(error, (Cancelled, GroupGone)) and not self._is_closed(epoch):
            self._events.link_broken(epoch, error.peer, orderly=True, reason=str(error))

    def _attempting(self, attempt: Attempt, plan_id: int = 0) -> AbstractContextManager[None]:
        """While it lasts the end of the epoch, or of the plan, cancels the attempt."""
        return self._attempts.attempting(attempt, plan_id, closed_epoch=lambda: self._tables.closed_epoch)

    def _is_closed(self, epoch: int) -> bool:
        return epoch <= self._tables.closed_epoch
