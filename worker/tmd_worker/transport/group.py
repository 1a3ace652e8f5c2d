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
from tmd_worker.transport.dialing import LinkError
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
    except InnerBroken as error:
        guard.epoch_broken(epoch, str(error))
        reason = str(error)
    except LinkError as error:
        reason = str(error)
    except Refused as error:
        operation.fail(str(error))
        return
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
        self._neighbours = neighbours
        self._queue: queue.SimpleQueue[tuple[Operation, LinkTable, Callable[[LinkTable], None]] | None] = queue.SimpleQueue()
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

    def _hand_over(self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None]) -> None:
        if self._caller == threading.get_ident():
            raise RuntimeError(f"{operation.name} was called in a signal's handler, in the middle of another of its group")
        if not self._running:
            self._running = True
            guard.spawn(f"group-{self.name}", lambda: self._run(guard))
        self._queue.put((operation, table, action))

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

    def _run(self, guard: Guard) -> None:
        while (item := self._queue.get()) is not None:
            with self._executing:
                self._run_one(guard, *item)

    def _run_one(self, guard: Guard, operation: Operation, table: LinkTable, action: Callable[[LinkTable], None]) -> None:
        def held() -> None:
            table.hold()
            try:
                action(table)
            finally:
                table.release()
            if guard.recorder is not None:
                guard.recorder.add(self.name, operation.index, operation.name, operation.outputs)

        execute(guard, operation, table.epoch, held)
