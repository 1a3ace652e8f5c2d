"""Faults fire where, when and for whom they were armed, once per job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.transport.mesh import mesh
from tmd_worker import faults


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    before = faults.incarnation, faults.rank, faults.step
    yield
    faults.arm("[]")
    faults.incarnation, faults.rank, faults.step = before


def arm(**fault: Any) -> None:
    faults.arm(json.dumps([{"point": "here", "action": "raise", **fault}]))


def test_nothing_happens_when_nothing_is_armed() -> None:
    faults.arm("[]")
    faults.point("here")
    assert not faults.armed("here")


def test_a_fault_fires_at_its_point_for_its_rank_and_step() -> None:
    arm(rank=2, step=5)
    for rank, step, name in [(1, 5, "here"), (2, 4, "here"), (2, 5, "there")]:
        faults.rank, faults.step = rank, step
        faults.point(name)
    faults.rank, faults.step = 2, 5
    assert faults.armed("here")
    with pytest.raises(faults.FaultRaised, match="fault injected at here, step 5"):
        faults.point("here")


def test_a_fault_can_name_the_incarnation() -> None:
    arm(incarnation="r1.0")
    faults.incarnation = "r1.1"
    faults.point("here")
    faults.incarnation = "r1.0"
    with pytest.raises(faults.FaultRaised):
        faults.point("here")


def test_the_count_says_which_passing() -> None:
    arm(count=3)
    faults.point("here")
    faults.point("here")
    with pytest.raises(faults.FaultRaised):
        faults.point("here")
    faults.point("here")


def test_once_per_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMD_FAULTS_DIR", str(tmp_path))
    arm()
    with pytest.raises(faults.FaultRaised):
        faults.point("here")
    arm()  # as in a replacement
    faults.point("here")
    assert [path.name for path in tmp_path.iterdir()] == ["fault-0"]


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", faults.EXIT_FAULT)])
def test_a_process_ends_as_it_was_told_to(action: str, status: int) -> None:
    arm(action=action)
    child = os.fork()
    if child == 0:
        faults.point("here")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_a_process_stops_until_it_is_continued() -> None:
    arm(action="stop")
    child = os.fork()
    if child == 0:
        faults.point("here")
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_cut_link_is_noticed_on_both_sides() -> None:
    with mesh(2) as made:
        arm(action="close_link")
        faults.point("here")
        for node in made.nodes:
            node.events.wait_poisoned()


def test_a_fault_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="explode"):
        arm(action="explode")
