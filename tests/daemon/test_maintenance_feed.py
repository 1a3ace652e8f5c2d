"""Announced maintenance comes to the core: changes only, and nothing while the resource manager is silent. The manager is a
stand-in here; tests/slurm asks a real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tmd.core.maintenance import Maintenance
from tmd.daemon.maintenance_feed import MaintenanceFeed
from tmd.nodes.base import QueryFailed

DEADLINE_S = 30.0
FANS = Maintenance(name="fans", start_s=100.0, end_s=200.0, nodes=("n1",))


class Core:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[list[Maintenance]] = []

    def maintenance(self, now: float, announced: Collection[Maintenance]) -> list[Any]:
        self.told.append(list(announced))
        return []


class Loop:
    """Carries events out at once."""

    def __init__(self) -> None:
        self.core = Core()

    def post(self, event: Callable[[float], Any]) -> None:
        event(0.0)


class Manager:
    """Answers from a list, one answer a question, None for silence; the last one for ever."""

    def __init__(self, *answers: list[Maintenance] | None) -> None:
        self.answers = list(answers)

    async def maintenance(self) -> list[Maintenance]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise QueryFailed("slurmctld does not answer")
        return answer


async def test_only_changes_are_told_and_silence_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.daemon.maintenance_feed.POLL_S", 0.001)
    loop = Loop()
    feed = asyncio.create_task(MaintenanceFeed(Manager(None, [], [FANS], None, [FANS], []), loop).run())  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        while len(loop.core.told) < 3:
            await asyncio.sleep(0.001)
    feed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await feed
    assert loop.core.told == [[], [FANS], []]
