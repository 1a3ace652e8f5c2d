"""Links between any two members of a group, opened when they are first used: for send/recv, and for collectives whose blocks go
straight from one member to another.

Contract: what was called ends, whatever becomes of the epoch. Who has posted a receive from any sender has links to all members
of the group afterwards, and so has everybody after an all-to-all; otherwise there are links only between those who talk.
"""

from __future__ import annotations

import functools
import threading
import time

from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport.channel import Channel, PairHost, deliver
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.dialing import LinkError
from tmd_worker.transport.group import Group
from tmd_worker.transport.labels import DIRECT, PAIR
from tmd_worker.transport.link import Link
from tmd_worker.transport.mailbox import Mailbox, MailboxClosed, Receive, deadline_after
from tmd_worker.transport.opening import Attempt
from tmd_worker.transport.work import Operation


class GroupPairs:
    """One group, from one epoch on. Members are named by their group ranks."""

    def __init__(self, host: PairHost, group: Group, epoch: int) -> None:
        self._host = host
        self._group = group
        self.epoch = epoch
        self._lock = threading.Lock()
        self._others = frozenset(range(group.size)) - {group.rank}
        self._mailbox = Mailbox(self._others)
        self._channels: dict[int, Channel] = {}
        self._direct: dict[int, Link] = {}
        #: What waits for a peer to dial.
        self._waiting: set[Attempt] = set()

    # ---------------------------------------------------------------- send/recv

    def send(self, operation: Operation, tensor: Tensor, place: int, tag: int) -> None:
        self.channel(place).send(operation, tensor, tag)

    def receive(self, operation: Operation, tensor: Tensor, place: int | None, tag: int) -> None:
        """`place` None: from whoever sends first."""
        receive = Receive(operation, tensor, tag, place, deadline_after(self._group.timeout_s))
        try:
            message = self._mailbox.post(receive)
        except MailboxClosed:
            operation.discard()
            return
        if message is not None:
            deliver(self._host, self.epoch, receive, message)
        elif self._host.is_closed(self.epoch):
            self._end(self._mailbox.withdraw(operation.work))  # else close() has seen to it
        else:
            for source in self._others if place is None else (place,):
                self.channel(source).listen()

    def withdraw(self, work: Work, reason: str) -> None:
        """The receive with this work, if it still waits, fails for this reason."""
        for receive in self._mailbox.withdraw(work):
            receive.operation.fail(reason)

    def channel(self, place: int) -> Channel:
        with self._lock:
            channel = self._channels.get(place)
            if channel is None:
                open_link = functools.partial(self._open, PAIR, place)
                channel = Channel(self._host, self._group, place, self.epoch, self._mailbox, open_link)
                self._channels[place] = channel
            return channel

    # ---------------------------------------------------------------- collectives

    def direct(self, table: LinkTable, members: frozenset[int]) -> dict[int, Link]:
        """A link to each of these members, for the group's thread alone; they must ask for the one to this member as well, in the
        same collective. Raises LinkError or Cancelled.

        Those to lower ranks, which this side dials, come first: so nobody waits in a circle.
        """
        for place in sorted(members - self._direct.keys()):
            try:
                link = self._open(DIRECT, place, table.epoch)
            except LinkError as error:
                self._host.opening_failed(table.epoch, error)
                raise
            with self._lock:
                self._direct[place] = link
            if self._host.is_closed(table.epoch):
                link.shut()
            else:
                self._host.pair_opened(self._group, DIRECT, self._group.ranks[place], link)
        return self._direct.copy() if len(members) == len(self._others) else {place: self._direct[place] for place in members}

    def _open(self, use: str, place: int, epoch: int) -> Link:
        attempt = Attempt(epoch, self._group.timeout_s)
        waits = place > self._group.rank
        if waits:
            with self._lock:
                self._waiting.add(attempt)
        try:
            label, shares = self._group.name + use, use == DIRECT  # a pair has a thread for each direction
            return self._host.open_pair(self._group, label, self._group.ranks[place], attempt, shares=shares)
        finally:
            with self._lock:
                self._waiting.discard(attempt)

    # ---------------------------------------------------------------- epochs come and go

    def switch(self, epoch: int, leavers: frozenset[int]) -> list[Link]:
        """Goes on in this epoch without the leavers (global ranks); returns the links to them."""
        gone = frozenset(place for place in self._others if self._group.ranks[place] in leavers)
        if gone:
            for receive in self._mailbox.leave_out(gone):
                receive.operation.fail("its sender was replaced before it sent anything; receive in the step in which is sent")
        with self._lock:
            self.epoch = epoch
            links = [self._direct.pop(place) for place in gone if place in self._direct]
            for place in gone & self._channels.keys():
                channel = self._channels.pop(place)
                channel.end()
                links += [channel.link] if channel.link is not None else []
            for channel in self._channels.values():
                channel.go_on(epoch)
            for link in self._direct.values():
                link.epoch = epoch
            for attempt in self._waiting:
                attempt.cancel(f"the job goes on in epoch {epoch}")
        return links

    def close(self) -> list[Link]:
        """Everything that was called ends. Returns the links, which the caller closes."""
        waiting = self._mailbox.close()
        with self._lock:
            channels = list(self._channels.values())
            links = [*self._direct.values(), *(channel.link for channel in channels if channel.link is not None)]
        for channel in channels:
            channel.end()
        self._end(waiting)
        return links

    def finish(self, reason: str, wait_s: float) -> None:
        """The group is being left: what was to be sent is waited for, so long at most; what waits to be received fails."""
        for receive in self._mailbox.close():
            receive.operation.fail(reason)
        with self._lock:
            channels = list(self._channels.values())
        deadline_s = time.monotonic() + wait_s
        for channel in channels:
            channel.finish(max(deadline_s - time.monotonic(), 0))
        for channel in channels:
            channel.end()
        with self._lock:
            for attempt in self._waiting:
                attempt.cancel(reason)

    def links(self) -> dict[str, dict[int, Link]]:
        """Label -> peer's global rank -> link."""
        ranks = self._group.ranks
        with self._lock:
            pairs = {ranks[place]: channel.link for place, channel in self._channels.items() if channel.link is not None}
            direct = {ranks[place]: link for place, link in self._direct.items()}
        found = {self._group.name + PAIR: pairs, self._group.name + DIRECT: direct}
        return {label: links for label, links in found.items() if links}

    @staticmethod
    def _end(receives: list[Receive]) -> None:
        for receive in receives:
            receive.operation.discard()


class PairBook:
    """The pairs of all groups of a process; the fabric tells it when epochs change."""

    def __init__(self, host: PairHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._groups: dict[str, GroupPairs] = {}

    def of(self, group: Group, epoch: int) -> GroupPairs:
        """Those of this group; made now if it is the first time in this epoch."""
        with self._lock:
            known = self._groups.get(group.name)
            if known is not None and known.epoch >= epoch:
                return known
            pairs = self._groups[group.name] = GroupPairs(self._host, group, epoch)
        if known is not None:
            known.close()  # made by a call that came just after its epoch was closed
        return pairs

    def finish(self, name: str, reason: str, wait_s: float) -> None:
        """This group is being left, see GroupPairs."""
        with self._lock:
            pairs = self._groups.get(name)
        if pairs is not None:
            pairs.finish(reason, wait_s)

    def forget(self, name: str) -> dict[str, dict[int, Link]]:
        """Returns its links, as `links` does, which the caller closes."""
        with self._lock:
            pairs = self._groups.pop(name, None)
        return {} if pairs is None else pairs.links()

    def switch(self, epoch: int, leavers: frozenset[int]) -> list[Link]:
        """The flip: returns the links to leavers, which nobody uses any more."""
        with self._lock:
            groups = list(self._groups.values())
        return [link for pairs in groups for link in pairs.switch(epoch, leavers)]

    def close(self, epoch: int) -> list[Link]:
        """The pairs of epochs up to this one end; returns their links."""
        with self._lock:
            ended = [self._groups.pop(name) for name in list(self._groups) if self._groups[name].epoch <= epoch]
        return [link for pairs in ended for link in pairs.close()]

    def links(self) -> dict[str, dict[int, Link]]:
        """Label -> peer's global rank -> link."""
        with self._lock:
            groups = list(self._groups.values())
        return {label: links for pairs in groups for label, links in pairs.links().items()}
