"""What jobs hold comes to the core: changes only, and nothing at all while the resource manager is silent. The manager is a
stand-in here; tests/slurm asks a real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

from tmd.core.allocation import Allocation
from tmd.core.records import JobRecord
from tmd.core.views import JobView
from tmd.daemon.job_feed import JobFeed
from tmd.nodes.base import QueryFailed


class Core:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Allocation] = []

    def jobs(self) -> list[JobView]:
        made = {"nnodes": 1, "nproc_per_node": 1, "world_size": 1, "owner_uid": 0, "job_key": b""}
        records = [JobRecord(job_id="7", state="running", **made), JobRecord(job_id="6", state="done", **made)]  # type: ignore[arg-type]
        return [JobView(record=record) for record in records]

    def allocation(self, now: float, word: Allocation) -> list[Any]:
        self.told.append(word)
        return []


class Loop:
    """Carries events out at once."""

    def __init__(self) -> None:
        self.core = Core()

    def post(self, event: Callable[[float], Any]) -> None:
        event(0.0)


class Manager:
    """Answers from a list, one answer a question; the last one for ever."""

    def __init__(self, *answers: Allocation | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, ...]] = []

    async def allocations(self, job_ids: Collection[str]) -> list[Allocation]:
        self.asked.append(tuple(job_ids))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise QueryFailed("slurmctld does not answer")
        return [answer]


async def told(monkeypatch: Any, manager: Manager, questions: int) -> list[Allocation]:
    """What the core has heard after so many questions."""
    monkeypatch.setattr("tmd.daemon.job_feed.POLL_S", 0.001)
    loop = Loop()
    feed = asyncio.create_task(JobFeed(manager, loop).run())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while len(manager.asked) < questions:
            await asyncio.sleep(0.001)
    feed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await feed
    return loop.core.told


def holding(*nodes: str) -> Allocation:
    return Allocation(job_id="7", state="running", nodes=nodes)


async def test_only_changes_are_told_and_only_live_jobs_asked_for(monkeypatch: Any) -> None:
    manager = Manager(holding("n1", "n2"), holding("n1", "n2"), holding("n1"), holding("n1"))
    assert await told(monkeypatch, manager, 5) == [holding("n1", "n2"), holding("n1")]
    assert set(manager.asked) == {("7",)}


async def test_a_manager_that_does_not_answer_says_nothing(monkeypatch: Any) -> None:
    manager = Manager(holding("n1"), None, None, holding("n1"), holding("n2"))
    assert await told(monkeypatch, manager, 6) == [holding("n1"), holding("n2")]
