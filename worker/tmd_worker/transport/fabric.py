"""All links of one process: its listener, its groups, and which epoch's links are live.

Contract: every method may be called from any thread. `FabricEvents` are called from transport threads and from threads
that run a collective, never while a lock of this package is held, so their implementation may call back into the fabric.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from tmd.protocol.control import TransportName
from tmd.protocol.membership import Member, Membership, Plan
from tmd_worker import faults, guard
from tmd_worker.core.ballot import Ballot
from tmd_worker.native import library
from tmd_worker.transport import process, topology
from tmd_worker.transport.buddy import BuddyChannel
from tmd_worker.transport.calls import Calls
from tmd_worker.transport.dialing import Cancelled, LinkError
from tmd_worker.transport.ending import Ending
from tmd_worker.transport.epochs import LinkSet, Remains
from tmd_worker.transport.events import FabricEvents
from tmd_worker.transport.group import Group
from tmd_worker.transport.holding import Holding
from tmd_worker.transport.leaving import Departures
from tmd_worker.transport.link import Link, LinkInfo
from tmd_worker.transport.linking import LATE_GROUP_S, Linking
from tmd_worker.transport.opening import Attempt, Attempts
from tmd_worker.transport.pairs import PairBook
from tmd_worker.transport.ports import Handler, Ports
from tmd_worker.transport.preparing import Preparer
from tmd_worker.transport.recording import BuildRecording
from tmd_worker.transport.tables import Tables
from tmd_worker.transport.vote import run_vote
from tmd_worker.transport.watcher import Watcher

__all__ = ["Cancelled", "Fabric", "FabricEvents", "LinkError", "LinkInfo"]

SESSION_GROUP = "tmd.session"
BUDDY_GROUP = "tmd.buddy"
_JOIN_S = 2.0
_EVERY_EPOCH = (1 << 63) - 1


class Fabric:
    """See the module's contract."""

    def __init__(
        self,
        *,
        host: str,
        job_key: bytes,
        incarnation: str,
        events: FabricEvents,
        port_range: tuple[int, int] | None = None,
        transport: TransportName = "delta",
    ) -> None:
        """Listens at once and becomes the process's fabric (`current()`)."""
        library.core()  # now, for it may have to be compiled, and not in the middle of a step
        self._events = events
        holding = Holding(Tables(incarnation))
        self._lock = holding.lock
        self._tables = holding.tables
        self._groups = holding.groups
        self._standing = holding.standing
        self._threads: list[threading.Thread] = []
        self._attempts = Attempts()
        self._incarnation = incarnation
        self._rank = -1
        self.calls = Calls(events)
        self.buddy = BuddyChannel(self)
        self.pairs = PairBook(self)
        self._watcher = Watcher(self._hung_up)
        self._ports = Ports(
            host=host,
            port_range=port_range,
            key=job_key,
            incarnation=incarnation,
            tables=self._tables,
            labels=holding.labels,
            spawn=self.spawn,
        )
        self.host: str = self._ports.listener.host
        self.port: int = self._ports.listener.port
        #: What carries the collectives of the script's groups. The vote and the records of buddies always use links.
        self.transport = transport
        self._ending = Ending(self._watcher, self.buddy, self.spawn)
        self._departures = Departures(holding, ports=self._ports, pairs=self.pairs, ending=self._ending, spawn=self.spawn)
        self._linking = Linking(
            holding,
            attempts=self._attempts,
            opener=self._ports.opener,
            preparer=Preparer(transport, self.host, self._ports.opener, self.spawn),
            departures=self._departures,
            watcher=self._watcher,
            ending=self._ending,
            events=events,
        )
        self.spawn("watcher", self._watcher.run)
        faults.close_link = self._break_a_link
        process.adopt(self)

    # ---------------------------------------------------------------- role and tables

    def set_role(self, rank: int, world_size: int, nproc_per_node: int) -> None:
        """In place, for a standby too: every group maps its own rank again. Raises ValueError if a group lacks that rank."""
        world = tuple(range(world_size))
        with self._lock:
            if SESSION_GROUP not in self._groups:
                self._groups[SESSION_GROUP] = Group(SESSION_GROUP, world, LATE_GROUP_S, topology.tree_neighbours)
                self._groups[BUDDY_GROUP] = Group(
                    BUDDY_GROUP, world, LATE_GROUP_S, lambda own, size: topology.buddy_neighbours(own, size, nproc_per_node)
                )
            for group in self._groups.values():
                group.take_role(rank)
            self._rank = rank
        self.buddy.take_role(rank, world_size, nproc_per_node)

    def expect(self, membership: Membership) -> None:
        """Handshakes of this table are accepted from now on (current, being installed, or a plan's successor)."""
        self._tables.expect(membership)

    # ---------------------------------------------------------------- opening

    def open(self, membership: Membership, rank: int, deadline_s: float) -> int:
        """Opens all links of all groups for this epoch and keeps them until activate(); blocks. Returns how many.

        Raises LinkError, or Cancelled when close() covered the epoch meanwhile.
        """
        opened = LinkSet(membership, rank)
        count = self._open(opened, 0, deadline_s)
        with self._lock:
            for link in opened.all_links():
                self._watcher.add(link)
        return count

    def unreached(self, epoch: int) -> int:
        """While open() is under way for it: the rank that is being dialed and has not answered yet, -1 for none."""
        return self._attempts.unreached(epoch)

    def stage(self, plan: Plan, rank: int, deadline_s: float) -> int:
        """A stayer: only the links to joiners that it neighbours; a joiner: all of its links, for activate(). Returns how many.

        Raises LinkError, or Cancelled when drop_staged() or close() came first.
        """
        joins = plan.successor.members[rank].incarnation == self._incarnation and rank in plan.leavers
        staged = LinkSet(plan.successor, rank, staged=True, only=None if joins else frozenset(plan.leavers))
        return self._open(staged, plan.plan_id, deadline_s)

    def _open(self, links: LinkSet, plan_id: int, deadline_s: float) -> int:
        count = self._linking.open(links, plan_id, deadline_s)
        self.buddy.adopt(links.epoch, links.links.get(BUDDY_GROUP, {}))
        return count

    def add_group(self, group: Group, name: str) -> None:
        """A new process group, which PyTorch calls `name`. While an epoch is live its links are opened now. Raises StepDiscarded
        when poisoned."""
        self._linking.add(group, name, self._rank)

    def leave(self, group: Group) -> None:
        """The script has destroyed it. Returns at once; the group's thread goes on until what was called before is over."""
        group.leave(self, lambda: self._leave(group))

    def _leave(self, group: Group) -> None:
        self.pairs.finish(group.name, group.gone, group.timeout_s or LATE_GROUP_S)
        self._departures.depart(group, self._rank)
        self.calls.forget(group.name)

    def group_gone(self, group: Group, by: int) -> None:
        self._departures.give_up(group, by)

    # ---------------------------------------------------------------- epochs come and go

    def activate(self, epoch: int) -> int:
        """What was opened or staged for this epoch becomes live in every group. Returns how many of these links had to be opened
        anew although both ends were members before (0 in the first epoch of this process)."""
        with self._lock:
            if self.is_closed(epoch):
                return 0
            links = self._standing.take(epoch)
            return self._go_live(links) if links is not None else 0

    def switch(self, plan: Plan, epoch: int) -> int:
        """The flip on a stayer, at a quiet boundary: staged links replace the leavers', kept ones go on in `epoch`. Returns how
        many links between stayers are not the ones of before: none, if the plan names nobody as a leaver who stays."""
        leavers = frozenset(plan.leavers)
        with self._lock:
            before, staged = self._standing.live, self._standing.staged.get(plan.plan_id)
            if before is None or staged is None or before.epoch != plan.base_epoch:
                return 0
            del self._standing.staged[plan.plan_id]
            after, replaced = before.succeed(staged, leavers)
            replaced.links += self.pairs.switch(epoch, leavers)
            self._ports.inbox.flip(before.epoch, epoch)
            self._standing.leave(replaced)
            self._departures.switch(before.epoch, epoch)
            for link in replaced.links:
                link.ignored = True
                self._watcher.remove(link)
            return self._go_live(after)

    def _go_live(self, links: LinkSet) -> int:
        """The lock is held. Returns how many links between members that stay were opened anew."""
        reopened = self._standing.go_live(links)
        self._tables.activate(links.epoch)
        for link in links.all_links():
            link.ignored = False
            self._watcher.add(link)
        for group in self._groups.values():
            if group.name in links.links:
                group.table = group.table_of(links.epoch, links.links[group.name], links.inners.get(group.name))
        self.buddy.activate(links.epoch, links.links.get(BUDDY_GROUP, {}))
        return reopened

    def retire(self, epoch: int) -> None:
        """Ends the leavers' links and the inner groups that the switch to `epoch` left unused."""
        with self._lock:
            left = self._standing.take_left(epoch - 1)
            self._departures.keep_only(self._standing.incarnations())
        self._ending.end(*left)

    def drop_staged(self, plan_id: int) -> None:
        """Closes what was staged for this plan, also what is being staged."""
        with self._lock:
            staged = self._standing.staged.pop(plan_id, None)
            self._departures.keep_only(self._standing.incarnations())
        self._attempts.cancel_plan(plan_id)
        self._ports.inbox.wake()
        if staged is not None:
            self.buddy.forget(staged.epoch)
            self._ending.end(staged.remains())
            for member in staged.membership.members.values():
                self._ports.inbox.drop(staged.epoch, member.incarnation)

    def close(self, epoch: int, reason: str) -> None:
        """Poison: STOP (best effort), then closes every link of an epoch up to this one; wakes all who wait on one; every
        work completes. Returns at once when that is done already."""
        if not self._tables.close(epoch):
            return
        with self._lock:
            doomed = self._standing.take_all(epoch)
            if self._standing.live is None:
                for group in self._groups.values():
                    group.table = None
            doomed.append(self._departures.close(epoch))
        self._attempts.cancel_epochs(epoch, reason)
        self._ports.inbox.close(epoch)
        doomed.append(Remains(epoch, self.pairs.close(epoch), []))
        self.buddy.close(epoch)
        self._ending.end(*doomed, drain=True)

    # ---------------------------------------------------------------- for the session

    def serve(self, kind: str, handler: Handler) -> None:
        """Other authenticated connections of this kind on the same listener, a thread each. The handler owns the socket.

        It gets the fields that the peer sent, with its incarnation under "incarnation". OSError that leaves it is
        dropped (the peer went away); any other exception ends the process.
        """
        self._ports.serve(kind, handler)

    def connect(self, member: Member, kind: str, fields: dict[str, Any], deadline_s: float) -> socket.socket:
        """An authenticated connection to another process's handler of this kind. Raises LinkError.

        The socket comes with a timeout of `deadline_s` per operation; change it with settimeout().
        """
        return self._ports.connect(member, kind, fields, deadline_s)

    def links(self) -> dict[str, dict[int, LinkInfo]]:
        """Group name -> peer's global rank -> live link."""
        with self._lock:
            live = self._standing.live
            by_group = dict(live.links) if live is not None else {}
            by_group |= self.pairs.links()
        return {name: {peer: link.info() for peer, link in links.items()} for name, links in by_group.items()}

    def vote(self, ballot: Ballot, deadline_s: float) -> tuple[Ballot | None, bool]:
        """The commit vote: a tree all-reduce over all ranks, in the caller's thread, after all collectives called before it.

        Returns (result, or None if it broke; whether a frame of this rank's ballot may have left). When it broke,
        link_broken has been reported or the epoch was closed.
        """
        for group in list(self._groups.values()):
            if group.last is not None and not group.last.ended_within(deadline_s):
                reason = f"a collective of group {group.name} did not end within {deadline_s:.0f} s before the vote"
                self._events.link_broken(ballot.epoch_min, self._rank, orderly=True, reason=reason)
                return None, False
        table = self._groups[SESSION_GROUP].table
        if table is None or table.epoch != ballot.epoch_min:
            return None, False
        outcome = run_vote(table, ballot, deadline_s)
        if outcome.broken is not None:
            self.link_ended(outcome.broken.link, str(outcome.broken), orderly=outcome.broken.orderly)
        return outcome.result, outcome.sent

    @property
    def sandbox(self) -> bool:
        """While True every collective is local, with valid values."""
        return self.calls.sandbox

    @sandbox.setter
    def sandbox(self, value: bool) -> None:
        self.calls.sandbox = value

    def close_all(self) -> None:
        """Closes everything, the listener too, and ends the threads. For the end of a process and for tests."""
        self.close(_EVERY_EPOCH, "this process ends")
        self._ports.close()
        self._watcher.close()
        self.buddy.end()
        for group in list(self._groups.values()):
            group.end_thread()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        process.forget(self)

    # ---------------------------------------------------------------- for threads that use links (group.Guard)

    @property
    def recorder(self) -> BuildRecording | None:
        return self.calls.recorder

    def is_closed(self, epoch: int) -> bool:
        return epoch <= self._tables.closed_epoch

    def link_ended(self, link: Link, reason: str, *, orderly: bool) -> None:
        orderly = orderly or self._said_stop(link.peer)
        if link.ending or link.ignored or link.farewell or self.is_closed(link.epoch):
            return  # asked last: an epoch that is closed meanwhile takes the link away on which a STOP would have been found
        self._events.link_broken(link.epoch, link.peer, orderly=orderly, reason=reason)

    def epoch_broken(self, epoch: int, reason: str) -> None:
        """Nobody is blamed: who died is known by the links."""
        if not self.is_closed(epoch):
            self._events.link_broken(epoch, self._rank, orderly=True, reason=reason)

    def _said_stop(self, peer: int) -> bool:
        """On whichever of its links: the one that broke may have been too full to take a STOP."""
        with self._lock:
            candidates = [link for links in self._standing.usable() for link in links.all_links() if link.peer == peer]
        return any(link.ends_in_order() for link in candidates)

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(body,), name=f"tmd-{name}", daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            self._threads.append(thread)
            thread.start()

    def open_pair(self, group: Group, label: str, peer: int, attempt: Attempt, *, shares: bool) -> Link:
        """A link between two members of a group, for send/recv or a `direct` one. Raises GroupGone, LinkError or Cancelled."""
        return self._linking.open_pair(group, label, peer, attempt, shares=shares)

    def pair_opened(self, group: Group, use: str, peer: int, link: Link) -> None:
        self._departures.adopt(group, use, peer, link)
        self._watcher.add(link)

    def opening_failed(self, epoch: int, error: LinkError) -> None:
        """Tells the runtime that a link of this epoch could not be opened, unless it is not wanted any more."""
        self._linking.failed(epoch, error)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            with guard.exempt():
                body()
        except BaseException as error:
            self.thread_died(error)

    def thread_died(self, error: BaseException) -> None:
        self._events.thread_died(error)

    def _hung_up(self, link: Link, orderly: bool) -> None:
        if self._departures.hung_up(link):
            return
        self.link_ended(link, f"rank {link.peer} {'stopped: it is poisoned' if orderly else 'hung up'}", orderly=orderly)

    def _break_a_link(self) -> None:
        """For the fault `close_link`: as if the network had cut it."""
        with self._lock:
            live = self._standing.live
            links = list(live.all_links()) if live is not None else []
        if links:
            links[-1].stream.shut(socket.SHUT_RDWR)

    def close_copies(self) -> None:
        """In a forked child: an inherited descriptor would keep the peers from noticing that this process died."""
        self._ports.listener.close_copy()
        self._watcher.close_copy()
        for link in (*self._standing.links(), *self._departures.links()):
            link.close_copy()
        for peers in self.pairs.links().values():
            for link in peers.values():
                link.close_copy()
