"""The one task that owns the core.

Contract: events go in one at a time, in order; what they persist is durable before anything else of theirs is done. While the
ledger cannot be written nothing is done at all: training goes on, the core's further decisions wait in order. An exception of
the core is a bug and ends `run`: a core that broke is not trusted, the next daemon starts from the ledger.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tmd.core.daemon import DaemonCore, Refused
from tmd.core.instructions import DirectAgent, Instruction, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger
from tmd.protocol.agent import AgentStatus

log = logging.getLogger("tmd.daemon")

#: Events whose writes go into one transaction.
BATCH = 256
#: More waiting events than this, and new agents are asked to come back later.
BACKLOG_LIMIT = 5000
#: Pauses between two attempts to write the ledger: the first and the longest.
RETRY_FIRST_S, RETRY_LONGEST_S = 0.1, 5.0
#: A deadline of the core that does not go away is not looked at more often than this.
TICK_SHORTEST_S = 0.005
#: The core is asked for its next deadline at least this often.
TICK_LONGEST_S = 1.0
#: If it was not for so long, the daemon was held up: by the ledger, or because its process was stopped.
HELD_UP_S = 2.0

Event = Callable[[float], list[Instruction]]


class NotDurable(RuntimeError):
    """The request was decided, but its decision cannot be written yet: nothing is done before it is."""


class Outlets(Protocol):
    """Where the core's instructions go. None of these blocks."""

    def persisted(self, persist: Persist) -> None:
        """This is durable now."""
        ...

    def to_agent(self, instruction: WelcomeAgent | RefuseAgent | DirectAgent) -> None: ...

    def release(self, instruction: ReleaseNode) -> None: ...


@dataclasses.dataclass(slots=True)
class _Entry:
    event: Callable[[float], tuple[Any, list[Instruction]]]
    answer: asyncio.Future[Any] | None = None


class CoreLoop:
    """See the module's contract."""

    def __init__(
        self,
        core: DaemonCore,
        ledger: Ledger,
        outlets: Outlets,
        *,
        paused: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.core = core
        self._ledger = ledger
        self._outlets = outlets
        self._clock = clock
        self._entries: collections.deque[_Entry] = collections.deque()
        self._statuses: dict[str, AgentStatus] = {}
        self._bell = asyncio.Event()
        #: As the ledger has it.
        self.paused = paused
        #: Since when the ledger cannot be written, and why.
        self.failing_since_s: float | None = None
        self.failure = ""

    @property
    def overloaded(self) -> bool:
        return len(self._entries) > BACKLOG_LIMIT

    def post(self, event: Event) -> None:
        """The event will be given to the core; nobody waits for what comes of it."""
        self._append(_Entry(lambda now: (None, event(now))))

    def post_status(self, status: AgentStatus) -> None:
        """As `post`; of several statuses of one agent that wait, only the newest is given to the core."""
        agent_id = status.agent_id
        waiting = agent_id in self._statuses
        self._statuses[agent_id] = status
        if not waiting:
            self.post(lambda now: self.core.agent_status(now, self._statuses.pop(agent_id)))

    async def ask(self, event: Callable[[float], tuple[Any, list[Instruction]]], *, timeout_s: float = 10.0) -> Any:
        """The event's answer, once what it decided is durable and done. Raises Refused, NotDurable."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._append(_Entry(event, answer))
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        if not done:
            raise NotDurable(f"decided, but not written after {timeout_s:g} s: {self.failure or 'the daemon is busy'}")
        return answer.result()

    async def run(self) -> None:
        """Until cancelled. Raises what the core raises, and LedgerTakenOver."""
        looked_s = self._clock()
        while True:
            await self._wait()
            looked_s = self._look_at_clock(looked_s)
            instructions, answers = self._take_batch()
            await self._carry_out(instructions)
            for answer, value in answers:
                if not answer.done():
                    answer.set_result(value)

    def _look_at_clock(self, before_s: float) -> float:
        """The time. If the last look is long ago, what others have said since waits unheard: it must not look like silence."""
        now = self._clock()
        if now - before_s >= HELD_UP_S:
            log.warning("the daemon was held up for %.1f s; nobody's silence in that time counts", now - before_s)
            self.core.held_up(now, now - before_s)
        return now

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._bell.set()

    async def _wait(self) -> None:
        """Until there is an event or a deadline."""
        if self._entries:
            await asyncio.sleep(0)  # the sockets' turn
            return
        self._bell.clear()
        deadline = self.core.next_deadline()
        wait_s = TICK_LONGEST_S if deadline is None else deadline - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_s, TICK_SHORTEST_S), TICK_LONGEST_S)):
                await self._bell.wait()

    def _take_batch(self) -> tuple[list[Instruction], list[tuple[asyncio.Future[Any], Any]]]:
        instructions: list[Instruction] = []
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        for _ in range(min(len(self._entries), BATCH)):
            entry = self._entries.popleft()
            try:
                value, wanted = entry.event(self._clock())
            except Refused as refusal:
                if entry.answer is None:
                    raise
                if not entry.answer.done():
                    entry.answer.set_exception(refusal)
                continue
            instructions += wanted
            if entry.answer is not None:
                answers.append((entry.answer, value))
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self._clock():
            instructions += self.core.tick(self._clock())
        return instructions, answers

    async def _carry_out(self, instructions: list[Instruction]) -> None:
        persist = merge(part for part in instructions if isinstance(part, Persist))
        releases = [part for part in instructions if isinstance(part, ReleaseNode)]
        if persist is not None or releases:
            await self._write(persist or Persist(), releases)
        for instruction in instructions:
            match instruction:
                case Persist():
                    pass
                case ReleaseNode():
                    self._outlets.release(instruction)
                case _:
                    self._outlets.to_agent(instruction)

    async def _write(self, persist: Persist, releases: list[ReleaseNode]) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                await self._ledger.write(persist, releases)
                break
            except LedgerUnavailable as error:
                self._ledger_fails(error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LONGEST_S)
        if self.failing_since_s is not None:
            log.warning("ledger written again after %.1f s; waiting decisions go out now", self._clock() - self.failing_since_s)
        self.failing_since_s, self.failure = None, ""
        if persist.paused is not None:
            self.paused = persist.paused
        self._outlets.persisted(persist)

    def _ledger_fails(self, error: LedgerUnavailable, pause_s: float) -> None:
        self.failure = str(error)
        if self.failing_since_s is None:
            self.failing_since_s = self._clock()
        log.error(
            "the ledger cannot be written: %s; training goes on, but no migration or recovery can until this is repaired "
            "(disk full? permissions? database down?); next attempt in %.1f s",
            error,
            pause_s,
        )


def merge(parts: Iterable[Persist]) -> Persist | None:
    """One Persist that leaves the ledger as all of them in order would; None for none."""
    found = list(parts)
    if len(found) < 2:
        return found[0] if found else None
    return Persist(
        jobs=tuple({record.job_id: record for part in found for record in part.jobs}.values()),
        ranks=tuple({(record.job_id, record.incarnation): record for part in found for record in part.ranks}.values()),
        nodes=tuple({(record.job_id, record.node): record for part in found for record in part.nodes}.values()),
        migrations=tuple({record.migration_id: record for part in found for record in part.migrations}.values()),
        events=tuple(record for part in found for record in part.events),
        paused=next((part.paused for part in reversed(found) if part.paused is not None), None),
    )
