"""What the pool has comes to the core: changes only, and nothing at all while the resource manager is silent. The manager is a
stand-in here; tests/slurm asks a real one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tmd.core.pool import Pool
from tmd.core.views import JobView
from tmd.daemon.pool_feed import PoolFeed
from tmd.nodes.base import QueryFailed


class Loop:
    """A core that keeps what it is told, at once."""

    def __init__(self) -> None:
        self.core = self
        self.told: list[Pool] = []

    def jobs(self) -> list[JobView]:
        return []

    def pool(self, now: float, word: Pool) -> list[Any]:
        self.told.append(word)
        return []

    def post(self, event: Callable[[float], Any]) -> None:
        event(0.0)


class Manager:
    """Answers from a list, one answer a look; the last one for ever."""

    def __init__(self, *answers: Pool | None) -> None:
        self.answers = list(answers)
        self.looks = 0

    async def look(self) -> Pool:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise QueryFailed("slurmctld does not answer")
        return answer


def word(**changes: Any) -> Pool:
    return Pool(**{"name": "standby", "way": "expand", "nodes": ("n5", "n6"), "free": ("n5",), **changes})


async def test_only_changes_are_told_and_a_silence_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tmd.daemon.pool_feed.IDLE_S", 0.001)
    caplog.set_level(logging.INFO, logger="tmd.daemon")
    gone = word(nodes=(), free=(), problem="there is no reservation standby")
    manager = Manager(word(), word(), None, None, word(), word(free=()), gone)
    loop = Loop()
    feed = asyncio.create_task(PoolFeed(manager, loop).run())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while manager.looks < 9:
            await asyncio.sleep(0.001)
    feed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await feed
    assert loop.told == [word(), word(free=()), gone]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "the pool is reservation standby: 2 nodes, 1 of them free"
    assert said[1].startswith("what the pool has is not known")
    assert said[2] == "the pool is reservation standby: there is no reservation standby"
    assert len(said) == 3, "nodes that come and go are no news"
