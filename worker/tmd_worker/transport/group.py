"""One process group: its members, the links that are live, and the thread that runs its operations in order."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from tmd_worker.check import places
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.dialing import GroupGone, LinkError
from tmd_worker.transport.inner import InnerBroken, InnerGroup
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.recording import BuildRecording
from tmd_worker.transport.topology import collective_neighbours
from tmd_worker.transport.work import Operation, TmdWork


class Guard(Protocol):
    """What a thread that uses links needs of the fabric."""

    @property
    def recorder(self) -> BuildRecording | None:
        """Takes the answers of collectives, while the script builds."""

    def is_closed(self, epoch: int) -> bool:
        """That epoch is over for this process."""

    def link_ended(self, link: Link, reason: str, *, orderly: bool) -> None:
        """Tells the runtime, unless this process closed the link itself."""

    def epoch_broken(self, epoch: int, reason: str) -> None:
        """Tells the runtime that this epoch cannot go on, though no peer is to blame, unless it is over."""

    def thread_died(self, error: BaseException) -> None:
        """A bug, or scripts that do not fit together: the process must end."""

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        """A thread whose exceptions end the process."""

    def group_gone(self, group: Group, by: int) -> None:
        """A collective was called that rank `by` has not called and never will: it has destroyed the group."""


class Refused(Exception):
    """This one operation cannot be done because of what the script asked for; its wait() says so."""


def execute(guard: Guard, operation: Operation, epoch: int, action: Callable[[], None]) -> None:
    """Runs one operation to its end, whatever that is. Only a bug (Desync, a wrong tensor) gets out of here."""
    if guard.is_closed(epoch):
        operation.discard()
        return
    try:
        with torch.no_grad():
            action()
    except LinkEnded as ended:
        guard.link_ended(ended.link, str(ended), orderly=ended.orderly)
        reason = str(ended)
        if ended.link.farewell and not guard.is_closed(epoch):
            operation.fail(ended.link.farewell)
            return
    except InnerBroken as error:
        guard.epoch_broken(epoch, str(error))
        reason = str(error)
    except (GroupGone, Refused) as error:
        operation.fail(str(error))
        return
    except LinkError as error:
        reason = str(error)
    else:
        operation.complete()
        return
    if guard.is_closed(epoch):
        operation.discard()
    else:
        operation.fail(f"{reason}, and nothing is poisoned: the job is ending, or the ranks disagree about that")


class Group:
    """`ranks` are the members' global ranks in group order; they never change, who holds them does."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        timeout_s: float,
        neighbours: Callable[[int, int], set[int]] = collective_neighbours,
        *,
        carried: bool = False,
        shares: bool = False,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.size = len(ranks)
        #: Its collectives are carried by an inner group, not by links of its own.
        self.carried = carried and self.size > 1
        #: Its links go through memory where both ends are on one host. One thread uses them, whichever way it sends or receives.
        self.shares = shares
        #: This process's place in the group.
        self.rank = 0
        #: The live links, or None: replaced as a whole, so an operation that has begun keeps its own.
        self.table: LinkTable | None = None
        #: The operation that was submitted last.
        self.last: TmdWork | None = None
        #: Why nothing can be done on it any more, once it was destroyed here or by another member.
        self.gone = ""
        self._is_cut = False
        #: How many collectives were submitted in which epoch.
        self._submitted = (-1, 0)
        #: Where a member that has left the group stopped, counted alike, and who destroyed it.
        self._limit: tuple[tuple[int, int], int] | None = None
        #: Guards these two. Whoever has it waits for no other lock.
        self._counting = threading.Lock()
        self._neighbours = neighbours
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls = itertools.count()
        self._submitting = threading.Lock()
        #: Whoever runs an operation has it.
        self._executing = threading.Lock()
        #: The thread that runs one it has called, or 0.
        self._caller = 0
        self._running = False

    def take_role(self, rank: int) -> None:
        """`rank` is global. Raises ValueError if the group was built without it."""
        if rank not in self.ranks:
            raise ValueError(
                f"this process cannot become rank {rank}: its group {self.name} was built for ranks {list(self.ranks)}; "
                "groups of other roles need a process that was started for that role"
            )
        self.rank = self.ranks.index(rank)

    def neighbours(self) -> set[int]:
        """Global ranks that this process needs a link to."""
        if self.carried:
            return set()
        return {self.ranks[place] for place in self._neighbours(self.rank, self.size)} - {self.ranks[self.rank]}

    def table_of(self, epoch: int, links: dict[int, Link], inner: InnerGroup | None = None) -> LinkTable:
        """From links by global rank."""
        places = {rank: place for place, rank in enumerate(self.ranks)}
        return LinkTable(epoch, self.rank, self.size, {places[peer]: link for peer, link in links.items()}, inner)

    def next_index(self) -> int:
        """Counts the collectives that were called on this group, whatever became of them."""
        return next(self._calls)

    def submit(
        self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None], *, waits: bool = False
    ) -> None:
        """Runs the operation after all that were submitted before it, in the group's thread (none for a group of one).

        `waits`: the caller does nothing else until it is done. Then it runs here if nothing is before it, which saves two
        changes of thread, most of the time of a small operation.
        """
        if self.size == 1:
            self._run_one(guard, operation, table, action)
            return
        here = False
        try:
            with self._submitting:
                if not self._admit(guard, operation, table.epoch):
                    return
                here = waits and (self.last is None or self.last.is_completed()) and self._executing.acquire(blocking=False)
                if not here:
                    self._hand_over(guard, operation, table, action)
                self.last = operation.work
            if here:
                self._run_here(guard, operation, table, action)
        finally:
            if here:
                self._caller = 0
                self._executing.release()

    def _admit(self, guard: Guard, operation: Operation, epoch: int) -> bool:
        """Counts it; False if it has failed already, since a member has left the group."""
        if self.gone:
            operation.fail(self.gone)
            return False
        with self._counting:
            in_epoch, calls = self._submitted
            number = calls if in_epoch == epoch else 0
            self._submitted = epoch, number + 1
            limit = self._limit
        if limit is not None and limit[0] <= (epoch, number):
            by = limit[1]
            self.gone = str(GroupGone(self.name, by))
            operation.fail(self.gone)
            guard.spawn(f"leave-{self.name}", lambda: guard.group_gone(self, by))
            return False
        return True

    def _hand_over(self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None]) -> None:
        if self._caller == threading.get_ident():
            raise RuntimeError(f"{operation.name} was called in a signal's handler, in the middle of another of its group")
        self._enqueue(guard, lambda: self._run_one(guard, operation, table, action))

    def _enqueue(self, guard: Guard, item: Callable[[], None]) -> None:
        if not self._running:
            self._running = True
            guard.spawn(f"group-{self.name}", self._run)
        self._queue.put(item)

    def _run_here(self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None]) -> None:
        self._caller = threading.get_ident()
        try:
            self._run_one(guard, operation, table, action)
        except BaseException as error:
            if isinstance(error, Exception) and not places.raised_by_user(error):
                guard.thread_died(error)
                raise
            # A signal's handler has raised. What the peers have of this operation is unknown: no other may follow on its links.
            reason = f"{operation.name} was interrupted on this rank"
            guard.epoch_broken(table.epoch, reason)
            if not operation.work.is_completed():
                operation.fail(reason)
            raise

    def end_thread(self) -> None:
        if self._running:
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._executing:
                item()

    # ---------------------------------------------------------------- its end

    def leave(self, guard: Guard, farewell: Callable[[], None]) -> None:
        """No operation follows. `farewell` comes after all that were submitted, in the group's thread, which ends with it."""
        with self._submitting:
            if self.gone:
                return
            self.gone = f"group {self.name} was destroyed on this rank"
            self._enqueue(guard, farewell)
            self._queue.put(None)

    def cut(self, reason: str) -> None:
        """As leave, but what is under way has no end: once its links are interrupted it fails for this reason."""
        with self._submitting:
            self.gone, self._is_cut = reason, True

    def limit(self, position: tuple[int, int], by: int) -> bool:
        """A member calls no collective from this (epoch, number) on: rank `by` has destroyed the group. True if one was here."""
        with self._counting:
            if self._limit is None or position < self._limit[0]:
                self._limit = position, by
            return position < self._submitted

    def called(self, epoch: int) -> tuple[int, int]:
        """Where this member stops if it leaves now, in this epoch at the earliest: epoch and number of the next collective."""
        with self._counting:
            position = max(self._submitted, (epoch, 0))
            return position if self._limit is None else min(position, self._limit[0])

    def _run_one(self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None]) -> None:
        def held() -> None:
            table.hold()
            try:
                action(table)
            except (InnerBroken, LinkEnded):
                if self._is_cut and not guard.is_closed(table.epoch):
                    raise Refused(self.gone) from None
                raise
            finally:
                table.release()
            if guard.recorder is not None:
                guard.recorder.add(self.name, operation.index, operation.name, operation.outputs)

        execute(guard, operation, table.epoch, held)
