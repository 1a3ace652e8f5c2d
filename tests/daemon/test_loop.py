"""The task that owns the core: durable first, one event at a time, nothing done while the ledger cannot be written."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.daemon import records
from tmd.core.daemon import DaemonCore, Refused
from tmd.core.instructions import DirectAgent, Instruction, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.settings import CoreSettings
from tmd.daemon import loop as loop_module
from tmd.daemon.loop import CoreLoop, Event, NotDurable, merge
from tmd.ledger.ledger import Ledger
from tmd.protocol.agent import AgentDirective, AgentStatus


class ScriptedCore(DaemonCore):
    """A core without jobs whose clock and deadlines the test sets."""

    def __init__(self) -> None:
        super().__init__(CoreSettings(), generation=1)
        self.statuses: list[int] = []
        self.held_up_s: list[float] = []
        self.ticks = 0
        self.deadline: float | None = None

    def agent_status(self, now: float, status: AgentStatus) -> list[Instruction]:
        self.statuses.append(status.version)
        return []

    def tick(self, now: float) -> list[Instruction]:
        self.ticks += 1
        self.deadline = None
        return []

    def held_up(self, now: float, seconds: float) -> None:
        assert not self.statuses, "told after an event that had waited"
        self.held_up_s.append(seconds)

    def next_deadline(self) -> float | None:
        return self.deadline


class Journal:
    """Outlets that look into the ledger file at the moment they are called: what is not there was not durable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    def persisted(self, persist: Persist) -> None:
        self.lines.append("persisted")

    def to_agent(self, instruction: WelcomeAgent | RefuseAgent | DirectAgent) -> None:
        self.lines.append(f"{instruction.agent_id} with events {self.durable()}")

    def release(self, instruction: ReleaseNode) -> None:
        self.lines.append(f"release {instruction.node} with events {self.durable()}")

    def durable(self) -> list[int]:
        with sqlite3.connect(self.path) as reader:
            found = [row[0] for row in reader.execute("SELECT event_id FROM events ORDER BY event_id")]
        reader.close()
        return found


class Rig:
    def __init__(self, ledger: Ledger, path: Path) -> None:
        self.core = ScriptedCore()
        self.journal = Journal(path)
        self.loop = CoreLoop(self.core, ledger, self.journal)
        self.path = path
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.loop.run())

    def block_ledger(self) -> sqlite3.Connection:
        other = sqlite3.connect(self.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return other


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(loop_module, "RETRY_FIRST_S", 0.02)
    ledger = await Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}?timeout=0.02")
    made = Rig(ledger, tmp_path / "ledger.db")
    yield made
    if made.task is not None:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
    await ledger.close()


def directive(agent_id: str, sequence: int = 1) -> DirectAgent:
    return DirectAgent(agent_id, AgentDirective(generation=1, sequence=sequence))


def answered(instructions: list[Instruction], now: float) -> tuple[str, list[Instruction]]:
    return "yes", instructions


def event(instructions: list[Instruction]) -> Event:
    return lambda now: instructions


def decision(event_id: int, agent_id: str) -> list[Instruction]:
    return [Persist(events=(records.event(event_id),)), directive(agent_id)]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Raises AssertionError naming what did not come."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.005)


async def test_what_was_decided_is_durable_before_anybody_is_told(rig: Rig) -> None:
    rig.start()
    for number in (1, 2, 3):
        instructions = [*decision(number, f"a{number}"), ReleaseNode("j1", f"n{number}", "replaced")]
        await rig.loop.ask(partial(answered, instructions))
    told = [line for line in rig.journal.lines if line != "persisted"]
    assert told == [
        "a1 with events [1]",
        "release n1 with events [1]",
        "a2 with events [1, 2]",
        "release n2 with events [1, 2]",
        "a3 with events [1, 2, 3]",
        "release n3 with events [1, 2, 3]",
    ]


async def test_events_that_wait_go_into_one_transaction_in_order(rig: Rig) -> None:
    for number in range(1, 20):
        rig.loop.post(event(decision(number, f"a{number}")))
    rig.start()
    await until(lambda: len(rig.journal.lines) == 20, "one write, 19 directives")
    assert rig.journal.lines[0] == "persisted"
    assert [line.split()[0] for line in rig.journal.lines[1:]] == [f"a{number}" for number in range(1, 20)]


async def test_while_the_ledger_cannot_be_written_nothing_is_done_and_then_everything(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """
    1. The database is locked by somebody else.
    2. Two decisions are made: no agent hears of them, the log says so loudly.
    3. The lock goes away: both are written, then both are told, in order.
    """
    rig.start()
    await rig.loop.ask(lambda now: (None, []))
    other = rig.block_ledger()
    rig.loop.post(lambda now: decision(1, "a1"))
    await until(lambda: rig.loop.failing_since_s is not None, "the loop knows")
    rig.loop.post(lambda now: decision(2, "a2"))
    with pytest.raises(NotDurable, match="locked"):
        await rig.loop.ask(lambda now: ("answer", []), timeout_s=0.2)
    assert rig.journal.lines == []
    assert "ledger cannot be written" in caplog.text
    other.execute("COMMIT")
    other.close()
    await until(lambda: len(rig.journal.lines) == 4, "both are told")
    assert rig.journal.lines[1].startswith("a1 with events [1")
    assert rig.journal.lines[3] == "a2 with events [1, 2]"
    assert rig.loop.failing_since_s is None


async def test_after_a_blocked_write_the_core_is_told_before_it_hears_what_has_waited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "TICK_LONGEST_S", 0.05)
    monkeypatch.setattr(loop_module, "HELD_UP_S", 0.3)
    rig.start()
    await rig.loop.ask(lambda now: (None, []))
    other = rig.block_ledger()
    rig.loop.post(lambda now: decision(1, "a1"))
    await until(lambda: rig.loop.failing_since_s is not None, "the loop waits for the ledger")
    rig.loop.post_status(AgentStatus(agent_id="a", version=1, time_s=0.0))
    await asyncio.sleep(0.35)
    other.execute("COMMIT")
    other.close()
    await until(lambda: rig.core.statuses == [1], "the status is heard")
    assert len(rig.core.held_up_s) == 1
    assert rig.core.held_up_s[0] >= 0.3


async def test_of_statuses_that_wait_only_the_newest_of_each_agent_counts(rig: Rig) -> None:
    for version in (1, 2, 3):
        rig.loop.post_status(AgentStatus(agent_id="a", version=version, time_s=0.0))
        rig.loop.post_status(AgentStatus(agent_id="b", version=10 * version, time_s=0.0))
    rig.start()
    await until(lambda: len(rig.core.statuses) == 2, "both agents were heard")
    rig.loop.post_status(AgentStatus(agent_id="a", version=4, time_s=0.0))
    await until(lambda: len(rig.core.statuses) == 3, "and a later one as well")
    assert rig.core.statuses == [3, 30, 4]


async def test_a_refusal_reaches_who_asked_and_harms_nobody_else(rig: Rig) -> None:
    rig.start()

    def refuse(now: float) -> tuple[None, list[Instruction]]:
        raise Refused("no standby is ready")

    outcomes = await asyncio.gather(
        rig.loop.ask(refuse), rig.loop.ask(partial(answered, decision(1, "a1"))), return_exceptions=True
    )
    assert isinstance(outcomes[0], Refused)
    assert outcomes[1] == "yes"


async def test_deadlines_of_the_core_are_kept(rig: Rig) -> None:
    rig.core.deadline = 0.0
    rig.start()
    await until(lambda: rig.core.ticks == 1, "an old deadline is acted on at once")
    rig.core.deadline = time.time() + 0.1
    rig.loop.post(lambda now: [])
    await until(lambda: rig.core.ticks == 2, "a new one when its time has come")


async def test_a_core_that_breaks_ends_the_loop(rig: Rig) -> None:
    rig.start()

    def broken(now: float) -> list[Instruction]:
        raise AssertionError("an invariant")

    rig.loop.post(broken)
    assert rig.task is not None
    with pytest.raises(AssertionError, match="an invariant"):
        await asyncio.wait_for(rig.task, 5)


def test_merged_writes_leave_what_the_last_one_would() -> None:
    first = Persist(jobs=(records.job(epoch=1), records.job("j2")), events=(records.event(1),), paused=True)
    second = Persist(jobs=(records.job(epoch=2),), ranks=(records.rank(),), events=(records.event(2),))
    merged = merge([first, second])
    assert merged is not None
    assert {job.job_id: job.epoch for job in merged.jobs} == {"j1": 2, "j2": 3}
    assert [event.event_id for event in merged.events] == [1, 2]
    assert (merged.ranks, merged.paused) == ((records.rank(),), True)
    assert merge([]) is None
