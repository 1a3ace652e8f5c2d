"""kill -9 of the process that writes the ledger, again and again: what was acknowledged is there, nothing is half there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.daemon.databases import change
from tests.daemon.ledger_writer import round_of
from tests.daemon.rig import DEADLINE_S, ROOT
from tmd.ledger.engine import damage
from tmd.ledger.ledger import Ledger

KILLS = 25


class Writer:
    """The writing process, life after life."""

    def __init__(self, database_url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.ledger_writer", database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        # Nothing here waits longer than this, whatever the process does.
        self._guard = threading.Timer(DEADLINE_S, self.end)
        self._guard.start()

    def killed_after(self, rounds: int, delay_s: float) -> int:
        """One life: SIGKILL so long after so many more acknowledged rounds than one. Returns the last that was acknowledged."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        began, pid = self._process.stdout.readline().split()
        assert began == "began"
        killer = threading.Timer(delay_s, os.kill, (int(pid), signal.SIGKILL))
        last = 0
        for count, line in enumerate(self._process.stdout):
            if line == "ended\n":
                break
            last = int(line)
            if count == rounds:
                killer.start()
        killer.join()
        return last

    def end(self) -> None:
        self._guard.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def writer(database_url: str) -> Iterator[Writer]:
    writer = Writer(database_url)
    yield writer
    writer.end()


async def test_what_was_acknowledged_is_there_and_nothing_is_half_there(writer: Writer, database_url: str) -> None:
    chance = random.Random(11)
    acknowledged = 0
    for life in range(1, KILLS + 1):
        acknowledged = max(acknowledged, writer.killed_after(chance.randrange(4), chance.uniform(0, 0.01)))
        ledger = await Ledger.open(database_url)
        job = await ledger.job("j1")
        assert job is not None
        last = job.epoch
        assert acknowledged <= last <= acknowledged + 1, "the last round may have been written and not yet acknowledged"
        expected = round_of(last)
        assert job == expected.jobs[0]
        assert [event.event_id for event in await ledger.events(limit=10_000)] == list(range(1, 2 * last + 1))
        assert sorted(each.attempt for each in await ledger.migrations(limit=10_000)) == list(range(1, last + 1))
        assert {node for _, node, _ in await ledger.pending_releases()} == {f"n{number}" for number in range(1, last + 1)}
        assert ledger.generation == 2 * life
        await ledger.close()
        acknowledged = last
    assert await change(database_url, damage) == []
    assert acknowledged > KILLS
