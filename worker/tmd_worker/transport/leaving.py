"""How a group that the script has destroyed gives back its links, its inner group and its memory, while others go on.

Contract: who leaves a group tells every member with which it shares something of it, and how many collectives it has called. What
two members share is closed once both have left: so what the other sent last is still received, and no end is taken for a death.
A collective that a member who left has not called can never be complete: whoever calls it leaves as well, in that member's name,
and tells its own neighbours. A member that cannot be told says so itself when it leaves, and an epoch's end ends all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tmd.protocol.membership import Member, Membership
from tmd_worker.threads import Spawn
from tmd_worker.transport.dialing import GroupGone
from tmd_worker.transport.ending import Ending
from tmd_worker.transport.epochs import LinkSet, Remains
from tmd_worker.transport.group import Group
from tmd_worker.transport.holding import Holding
from tmd_worker.transport.inner import InnerGroup
from tmd_worker.transport.labels import MEETING, OWN, PAIR, USE
from tmd_worker.transport.link import Link
from tmd_worker.transport.pairs import PairBook
from tmd_worker.transport.ports import Ports
from tmd_worker.transport.rendezvous import turn_away
from tmd_worker.transport.telling import LEAVING, LEFT, STAYS, Farewell, Teller


@dataclasses.dataclass(slots=True, eq=False)
class _Shared:
    """What this process still shares with one other member of a group that it has left."""

    member: Member
    peer: int
    epoch: int
    links: list[Link] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Left:
    """A group that this process has left, by incarnation of those who may not have. `inners` need all of them."""

    group: Group
    farewell: Farewell
    shared: dict[str, _Shared] = dataclasses.field(default_factory=dict)
    inners: list[tuple[int, InnerGroup]] = dataclasses.field(default_factory=list)
    #: Those of its links that were for send/recv.
    talking: list[Link] = dataclasses.field(default_factory=list)

    def links(self) -> Iterator[Link]:
        for shared in self.shared.values():
            yield from shared.links


class Departures:
    """For one process."""

    def __init__(self, holding: Holding, *, ports: Ports, pairs: PairBook, ending: Ending, spawn: Spawn) -> None:
        self._lock = holding.lock
        self._groups = holding.groups
        self._standing = holding.standing
        self._tables = holding.tables
        self._labels = holding.labels
        self._ports = ports
        self._teller = Teller(ports)
        self._pairs = pairs
        self._ending = ending
        self._spawn = spawn
        self._left: dict[str, _Left] = {}
        #: Group -> incarnation of a member that has left it while this process has not.
        self._heard: dict[str, dict[str, Farewell]] = {}
        ports.serve(LEAVING, self._hear)
        ports.left_over = self._sweep

    # ---------------------------------------------------------------- this process leaves

    def depart(self, group: Group, by: int) -> None:
        """No call on the group follows. Blocks until those concerned were told. `by`: the rank that destroyed it."""
        if not self._mark(group, by):
            return
        self._tell_all(group.name)

    def give_up(self, group: Group, by: int) -> None:
        """As depart, and what is under way on the group fails: it needs a member that has left."""
        group.cut(str(GroupGone(group.name, by)))
        self._pairs.finish(group.name, group.gone, wait_s=0)
        self.depart(group, by)
        with self._lock:
            left = self._left.get(group.name)
            links = list(left.links()) if left is not None else []
            inners = [inner for _, inner in left.inners] if left is not None else []
        for link in links:  # only now: whoever sees an end of these has been told why
            link.interrupt()
        for inner in inners:
            inner.abort()
        group.end_thread()

    def _mark(self, group: Group, by: int) -> bool:
        """From now on whoever asks is told. False if that has been done."""
        with self._lock:
            if self._groups.get(group.name) is not group:
                return False
            del self._groups[group.name]
            own = by == group.ranks[group.rank]
            epoch, calls = group.called(self._next_epoch())
            group.table = None
            left = _Left(group, Farewell(group=group.name, by=by, epoch=epoch, calls=calls))
            self._left[group.name] = left
            self._labels.end(group.name, OWN if own else by)
            for links in self._standing.sets():
                self._take_out(links, left)
            live = self._standing.live
            if live is not None:
                for label, by_peer in self._pairs.forget(group.name).items():
                    for peer, link in by_peer.items():
                        self._share(left, live, peer).links.append(link)
                        if label.endswith(PAIR):
                            left.talking.append(link)
            self._take_from_inbox(left)
            self._say_whose_end(left)
            self._heard.pop(group.name, None)  # they answer that they have left when they are told
            return True

    def _next_epoch(self) -> int:
        """In which the next collective of this process would be."""
        live = self._standing.live
        if live is not None:
            return live.epoch
        return min((links.epoch for links in self._standing.sets()), default=self._tables.closed_epoch + 1)

    def _take_out(self, links: LinkSet, left: _Left) -> None:
        """What this set has of the group is no part of it any more."""
        opened, inner = links.take_out(left.group.name)
        for peer, link in opened.items():
            self._share(left, links, peer).links.append(link)
        if inner is not None:
            left.inners.append((links.epoch, inner))
            for peer in set(left.group.ranks) - {links.rank}:
                self._share(left, links, peer)

    @staticmethod
    def _share(left: _Left, links: LinkSet, peer: int) -> _Shared:
        member = links.membership.members[peer]
        shared = left.shared.setdefault(member.incarnation, _Shared(member, peer, links.epoch))
        shared.epoch = max(shared.epoch, links.epoch)
        return shared

    def _take_from_inbox(self, left: _Left) -> None:
        """Links that others have dialed and this process does not want any more."""
        for hello, connection in self._ports.inbox.claim(left.group.name):
            table = self._tables.of(hello.epoch)
            member = table.members.get(hello.rank) if table is not None else None
            if hello.group.endswith(MEETING):
                turn_away(connection.sock, left.farewell.by)
                continue
            if member is None or member.incarnation != hello.incarnation:
                connection.close()
                continue
            link = Link(connection, peer=hello.rank, epoch=hello.epoch, timeout_s=left.group.timeout_s)
            left.shared.setdefault(hello.incarnation, _Shared(member, hello.rank, hello.epoch)).links.append(link)
            if hello.group.endswith(PAIR):
                left.talking.append(link)

    def _say_whose_end(self, left: _Left) -> None:
        """The links that are left over are watched, and their ends are nobody's fault."""
        for link in left.links():
            link.farewell = str(GroupGone(left.group.name, left.farewell.by))
            self._ending.watch(link)

    def _tell_all(self, name: str) -> None:
        """Each member that it shares something with, and again those that could not be told, as long as it shares something."""
        self._teller.tell_each(functools.partial(self._untold, name), functools.partial(self._told, name))
        with self._lock:
            self._settle(name)

    def _untold(self, name: str, told: set[str]) -> list[tuple[Member, Farewell]]:
        """Those that are still to be told, beginning with the next rank: not all members at the same one."""
        with self._lock:
            left = self._left.get(name)
            if left is None:
                return []
            own, size = left.group.ranks[left.group.rank], max(left.group.ranks) + 1
            ordered = sorted(left.shared.values(), key=lambda shared: (shared.peer - own) % size)
            return [(shared.member, left.farewell) for shared in ordered if shared.member.incarnation not in told]

    def _told(self, name: str, incarnation: str, answer: bytes) -> None:
        self._end_talk(name, incarnation)
        if answer == LEFT:
            self._member_left(name, incarnation)

    def _end_talk(self, name: str, incarnation: str) -> None:
        """What follows the last message is the end, also for who waits for another one."""
        with self._lock:
            left = self._left.get(name)
            shared = left.shared.get(incarnation) if left is not None else None
            if left is not None and shared is not None:
                for link in shared.links:
                    if link in left.talking:
                        link.stream.shut(socket.SHUT_WR)

    # ---------------------------------------------------------------- others leave

    def _hear(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        """The handler of such a connection."""
        incarnation: str = fields.pop("incarnation")
        farewell = msgspec.convert(fields, Farewell)
        with self._lock:
            over = self._labels.over(farewell.group) is not None
            # One that was replaced may still run somewhere; its word counts for nothing.
            heard = not over and self._tables.knows(incarnation)
            hopeless = self._note(incarnation, farewell) if heard else None
        try:
            with sock:
                sock.sendall(LEFT if over else STAYS)
        finally:
            if over:
                self._member_left(farewell.group, incarnation)
            elif hopeless is not None:
                self.give_up(hopeless, farewell.by)

    def _note(self, incarnation: str, farewell: Farewell) -> Group | None:
        """The group, if something was called on it that the member has not called."""
        self._heard.setdefault(farewell.group, {})[incarnation] = farewell
        for links in self._standing.sets():
            self.mark(links.links, links.membership)
        live = self._standing.live
        if live is not None:
            self.mark(self._pairs.links(), live.membership)
        group = self._groups.get(farewell.group)
        if group is not None and group.limit((farewell.epoch, farewell.calls), farewell.by):
            return group
        return None

    def mark(self, by_label: Mapping[str, Mapping[int, Link]], membership: Membership) -> None:
        """The ends of links to members that have left their group are to be taken for what they are. The caller has the lock.

        `by_label`: by the label of the group, or of a use of it, and the global rank.
        """
        for label, by_peer in list(by_label.items()):  # a set may be added to meanwhile
            heard = self._heard.get(label.partition(USE)[0], {})
            for peer, link in list(by_peer.items()):
                farewell = heard.get(membership.members[peer].incarnation)
                if farewell is not None:
                    link.farewell = str(GroupGone(farewell.group, farewell.by))

    def _member_left(self, name: str, incarnation: str) -> None:
        """Both have left: what they share ends."""
        with self._lock:
            left = self._left.get(name)
            if left is not None:
                self._close(left, incarnation)
                self._settle(name)

    def _close(self, left: _Left, incarnation: str) -> None:
        shared = left.shared.pop(incarnation, None)
        if shared is not None:
            self._ending.close(shared.links)

    def _settle(self, name: str) -> None:
        """The lock is held. Once all have left nothing is kept of the group."""
        left = self._left.get(name)
        if left is not None and not left.shared:
            del self._left[name]
            self._ending.release([inner for _, inner in left.inners])

    # ---------------------------------------------------------------- links that come late

    def absorb(self, links: LinkSet) -> None:
        """A set that has just become one of the standing. Groups that were left while it was opened are taken out of it; those
        that a member was found to have left are left here as well, once its epoch has come. The caller has the lock."""
        self.mark(links.links, links.membership)
        for name in {*links.links, *links.inners}:
            if self._groups.get(name) is not links.groups[name]:
                self._take_late(links.groups[name], links)
        live = self._standing.live
        for name, by in list(links.gone.items()):
            group = self._groups.get(name)
            if group is None:
                continue
            if live is not None and live.epoch < links.epoch:
                group.limit((links.epoch, 0), by)  # until the flip some may lack what that member has sent already
            else:
                self._spawn(f"leave-{name}", functools.partial(self.give_up, group, by))

    def _take_late(self, group: Group, links: LinkSet) -> None:
        left = self._again(group)
        self._take_out(links, left)
        self._say_whose_end(left)
        self._spawn(f"leave-{group.name}", lambda: self._tell_all(group.name))

    def adopt(self, group: Group, use: str, peer: int, link: Link) -> None:
        """This link for messages, or direct one, has just been opened, and whoever leaves the group from now on finds it. Raises
        GroupGone if that has been done, in this process."""
        with self._lock:
            live = self._standing.live
            if self._groups.get(group.name) is group:
                if live is not None:
                    self.mark({group.name: {peer: link}}, live.membership)
                return
            left = self._again(group)
            if live is None or live.epoch != link.epoch:
                self._ending.close([link])
            elif link not in left.links():
                self._share(left, live, peer).links.append(link)
                if use == PAIR:
                    left.talking.append(link)
                self._say_whose_end(left)
            by = left.farewell.by
        self._spawn(f"leave-{group.name}", lambda: self._tell_all(group.name))
        raise GroupGone(group.name, by)

    def _again(self, group: Group) -> _Left:
        """What is kept of a group that was left, perhaps by all."""
        left = self._left.get(group.name)
        if left is None:
            by = self._labels.over(group.name)
            by = group.ranks[group.rank] if by is None or by == OWN else by
            epoch, calls = group.called(0)
            left = self._left[group.name] = _Left(group, Farewell(group=group.name, by=by, epoch=epoch, calls=calls))
        return left

    def _sweep(self, name: str) -> None:
        """A link of a group that this process has left came in at that very moment."""
        with self._lock:
            left = self._left.get(name)
            if left is None:
                for _, connection in self._ports.inbox.claim(name):
                    connection.close()  # all others had left
                return
            self._take_from_inbox(left)
            self._say_whose_end(left)
        self._tell_all(name)

    # ---------------------------------------------------------------- epochs come and go

    def switch(self, before: int, after: int) -> None:
        """The flip. The caller has the lock."""
        for left in self._left.values():
            for shared in left.shared.values():
                shared.epoch = after if shared.epoch == before else shared.epoch
            for link in left.links():
                link.epoch = after if link.epoch == before else link.epoch
            left.inners = [(after if epoch == before else epoch, inner) for epoch, inner in left.inners]

    def keep_only(self, incarnations: Iterable[str]) -> None:
        """Nothing is shared any more with whoever is no member of any table. The caller has the lock."""
        members = set(incarnations)
        for name, left in list(self._left.items()):
            for gone in left.shared.keys() - members:
                self._close(left, gone)
            self._settle(name)
        for heard in self._heard.values():
            for gone in heard.keys() - members:
                del heard[gone]

    def close(self, epoch: int) -> Remains:
        """All that is left of epochs up to this one, for the caller to end. The caller has the lock."""
        remains = Remains(epoch, [], [])
        for name, left in list(self._left.items()):
            for incarnation, shared in list(left.shared.items()):
                remains.links += [link for link in shared.links if link.epoch <= epoch]
                shared.links = [link for link in shared.links if link.epoch > epoch]
                if shared.epoch <= epoch:
                    del left.shared[incarnation]
            remains.inners += [inner for of, inner in left.inners if of <= epoch]
            left.inners = [(of, inner) for of, inner in left.inners if of > epoch]
            self._settle(name)
        if self._standing.live is None:
            self._heard.clear()
        return remains

    def hung_up(self, link: Link) -> bool:
        """True if it is one of those that are left of a group: then its end is nobody's fault, and it is closed."""
        with self._lock:
            for name, left in self._left.items():
                for incarnation, shared in left.shared.items():
                    if link in shared.links:
                        shared.links.remove(link)
                        self._ending.close([link])
                        if not shared.links and not left.inners:
                            self._member_left(name, incarnation)
                        return True
        return False

    def links(self) -> Iterator[Link]:
        """All that are still open."""
        for left in self._left.values():
            yield from left.links()
