"""A joiner asks for a state before its source has come to rest: it waits for as long as the source lives and the epoch stands."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch import nn

from tests.session.rig import Rig
from tmd.protocol.membership import Install, Resolution, Source
from tmd_worker import installing, serving
from tmd_worker.step import Step

#: The source must speak this often, and the step lasts several times as long.
SILENCE_LIMIT_S = 0.5
STEP_S = 2.0
#: For what takes milliseconds unless the machine is busy.
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BEAT_S", 0.05)
    monkeypatch.setattr(installing, "STATE_TIMEOUT_S", SILENCE_LIMIT_S)


class Survivor:
    """Rank 0, whose step 0 lasts until the test lets it end."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.rig.track(model=nn.Linear(2, 2))
        self.rig.server.start()
        self.in_step, self.may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def run(self) -> Iterator[Step]:
        yield from self.rig.loop.warm_up(standby=False)
        yield from self.rig.loop.run(1)

    def _train(self) -> None:
        self.rig.begin()
        for step in self.run():
            with step:
                if not step.shadow and not self.may_end.is_set():
                    self.in_step.set()
                    assert self.may_end.wait(DEADLINE_S)

    def lose_rank_1(self) -> None:
        """In the middle of the step; the daemon has decided that it runs again."""
        self._thread.start()
        assert self.in_step.wait(DEADLINE_S)
        self.rig.break_link()
        self.rig.order(poison_epoch=0, resolution=Resolution(epoch=0, target_step=0))

    def end(self) -> None:
        self.may_end.set()
        self.rig.install(2, 0)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def survivor() -> Iterator[Survivor]:
    made = Survivor()
    made.lose_rank_1()
    yield made
    made.end()


@pytest.fixture
def joiner(survivor: Survivor) -> Rig:
    """Told to take rank 1 in epoch 1."""
    made = Rig("c", None)
    made.track(model=nn.Linear(2, 2))
    made.fabric.peer = survivor.rig.fabric
    made.runtime.tell(made.core.started, "127.0.0.1", 2)
    made.runtime.tell(made.core.warm_up_ended)
    install = Install(
        membership=made.table(1, "ac"), target_step=0, joining={1: Source(replica_rank=0, record_rank=None)}, fresh=False
    )
    made.order(rank=1, install=install)
    return made


def test_a_step_of_any_length_is_waited_for(survivor: Survivor, joiner: Rig) -> None:
    assert not threading.Event().wait(STEP_S)
    assert (joiner.core.failed_epoch, joiner.core.has_state) == (-1, False)
    survivor.may_end.set()
    joiner.until(lambda: joiner.core.has_state)
    assert joiner.tracked.digest()["parameters"] == survivor.rig.tracked.digest()["parameters"]


def test_who_waits_hears_at_once_that_the_epoch_is_over(survivor: Survivor, joiner: Rig) -> None:
    survivor.rig.order(poison_epoch=1)
    joiner.until(lambda: joiner.core.failed_epoch == 1)
    assert "rank 0 will not come to the boundary before step 0" in joiner.core.reason


def test_a_source_that_falls_silent_is_not_waited_for(survivor: Survivor, joiner: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BEAT_S", 60.0)
    joiner.until(lambda: joiner.core.failed_epoch == 1)
    assert "timed out" in joiner.core.reason
