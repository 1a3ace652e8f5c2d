"""A joiner reads from several processes at once; one that dies or stops in the middle leaves its share to the others."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.handoff.meeting import MeetingChunks
from tests.handoff.memory import Buffers
from tests.handoff.rig import DEADLINE_S, dial_port
from tests.handoff.source_program import JOINERS, contents
from tmd_worker.handoff.agreement import Agreement
from tmd_worker.handoff.pulling import Puller
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import CHUNK_BYTES, Chunk, Region, TransferFailed, split

ROOT = Path(__file__).resolve().parents[2]
#: So many chunks that no source has asked for all of them before the other begins.
SIZES = [16 * CHUNK_BYTES + 3, 17, 4 * CHUNK_BYTES]
SEED = 5


class SourceProcess:
    """To be joined by JOINERS, and to be stopped and killed."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}"}
        command = [sys.executable, "-m", "tests.handoff.source_program", str(os.getpid()), str(SEED), *map(str, SIZES)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self._told: dict[str, Any] = {}

    def agreement(self) -> Agreement:
        """What `propose` of one more joiner would have come to."""
        assert self.process.stdout is not None
        self._told = self._told or json.loads(self.process.stdout.readline())
        end = Tcp().joiner(dial_port(self._told["port"]))
        end.connect(bytes.fromhex(self._told["answers"].pop()), DEADLINE_S)
        return Agreement("tcp", "the only one", end, end, "tcp", b"")

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


class Joiner:
    """Reads from each of some sources in a thread of its own."""

    def __init__(self, agreements: list[Agreement], landed: Callable[[int, Chunk], None], patience_s: float) -> None:
        self.memory = Buffers.empty(SIZES)
        self._shared = MeetingChunks(split(SIZES), patience_s)
        regions = [Region(0, size, entry) for entry, size in enumerate(SIZES)]
        self.pullers = [
            Puller(agreement, {"tcp": regions}, self.memory.memory, functools.partial(landed, number), DEADLINE_S)
            for number, agreement in enumerate(agreements)
        ]
        self.failures: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._move, args=(number,)) for number in range(len(agreements))]
        for thread in self._threads:
            thread.start()

    def _move(self, number: int) -> None:
        try:
            self.pullers[number].move(self._shared)
        except TransferFailed as error:
            self.failures[number] = str(error)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        assert self._shared.missing == 0
        assert self.memory.contents() == contents(SEED, SIZES)


@pytest.fixture
def two() -> Iterator[list[SourceProcess]]:
    with contextlib.ExitStack() as ending:
        yield [ending.enter_context(contextlib.closing(SourceProcess())) for _ in range(2)]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(signal.SIGKILL, r"closed the connection|reset by peer|Broken pipe", id="killed"),
        pytest.param(signal.SIGSTOP, "it was late: the other sources had nothing to do but to wait", id="stopped"),
    ],
)
def test_a_source_that_is_gone_in_the_middle_leaves_its_share_to_the_other(
    two: list[SourceProcess], number: signal.Signals, reason: str
) -> None:
    """It has asked for some chunks by then, and brought one. That it stopped is noticed long before a chunk's deadline."""
    struck = threading.Event()

    def strike(source: int, _chunk: Chunk) -> None:
        if source == 0 and not struck.is_set():
            struck.set()
            two[0].process.send_signal(number)

    with contextlib.ExitStack() as ending:
        joiner = Joiner([ending.enter_context(contextlib.closing(source.agreement())) for source in two], strike, patience_s=0.5)
        joiner.end()
    assert list(joiner.failures) == [0]
    assert re.search(reason, joiner.failures[0])
    brought = [puller.bytes_by_transport["tcp"] for puller in joiner.pullers]
    assert brought[0] > 0
    assert sum(brought) == sum(SIZES)


def test_four_joiners_draw_from_two_sources_at_once(two: list[SourceProcess]) -> None:
    with contextlib.ExitStack() as ending:
        agreements = [[ending.enter_context(contextlib.closing(source.agreement())) for source in two] for _ in range(JOINERS)]
        joiners = [Joiner(each, lambda *_: None, patience_s=DEADLINE_S) for each in agreements]
        for joiner in joiners:
            joiner.end()
            assert joiner.failures == {}
            assert all(puller.bytes_by_transport["tcp"] > 0 for puller in joiner.pullers)
