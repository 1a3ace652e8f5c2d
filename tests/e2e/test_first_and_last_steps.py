"""Losses before anything is committed, and when everything is; survivors that wait in vain; scripts that fail by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Job, assert_unharmed, marked, until
from tests.e2e.losses_rig import running_agents, strike, wait_written, written

SCRIPT = Path(__file__).with_name("train_trapped.py")
STEPS = 25
HOLD_LIMIT_S = 5.0
#: EX_TEMPFAIL: the job is worth trying again.
EXIT_GIVEN_UP = 75


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("edges"), nodes=6, core={"restart_limit": 2}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("impatient"), nodes=3, core={"hold_limit_s": HOLD_LIMIT_S}) as cluster:
        yield cluster


def trap(where: str, rank: int, action: str, *, step: int = 0, always: bool = False) -> dict[str, Any]:
    """A Trap of train_trapped.py."""
    return {"where": where, "rank": rank, "step": step, "action": action, "always": always}


def start(cluster: Cluster, *traps: dict[str, Any], **shape: Any) -> Job:
    """A job with these traps, none of which has sprung, on nodes that are whole."""
    cluster.tidy()
    for marker in cluster.folder.glob("trap-*"):
        marker.unlink()
    environment = {"E2E_TRAPS": json.dumps(traps), "E2E_TRAPS_DIR": str(cluster.folder)}
    return cluster.start_job(steps=STEPS, script=SCRIPT, env=environment, **shape)


def sprung(job: Job, number: int) -> int:
    """The process that has come to a trap, once one has."""
    marker = job.cluster.folder / f"trap-{number}"
    return int(until(lambda: marker.exists() and marker.read_text(), f"trap {number} of {job.id} has sprung"))


def failure(job: Job) -> dict[str, Any]:
    """The record of a job that has failed and left no process."""
    record: dict[str, Any] = job.wait_state("failed")["record"]
    job.wait_gone()
    return record


def ended_well(job: Job, reference: Job, *, killed: Iterable[int]) -> dict[str, Any]:
    record: dict[str, Any] = job.wait_state("done")["record"]
    job.wait_gone()
    assert record["approximations"] == []
    assert_unharmed(job, reference, lines_lost=dict.fromkeys(killed, 1))
    return record


def test_ranks_lost_in_the_build_and_in_the_warm_up(small: Cluster, reference: Job) -> None:
    """Half of a build cannot be taken back, so the job starts again from nothing, and may do so more than once."""
    job = start(small, trap("build", 1, "kill"), trap("warm-up", 2, "kill"), standby=1)
    record = ended_well(job, reference, killed=(1, 2))
    assert 1 <= record["restarts"] <= 2
    assert sprung(job, 0) != sprung(job, 1)


def test_ranks_lost_in_the_first_and_in_the_last_step(small: Cluster, reference: Job) -> None:
    job = start(small, trap("step", 3, "kill", step=0), trap("step", 0, "kill", step=STEPS - 1), standby=2)
    record = ended_well(job, reference, killed=(0, 3))
    assert record["restarts"] == 0
    assert [list(each["leavers"]) for each in job.migrations()] == [["3"], ["0"]]
    assert {each["state"] for each in job.migrations()} == {"done"}


def test_a_rank_lost_with_its_buddy_in_the_first_step(small: Cluster, reference: Job) -> None:
    """Nothing was committed, so nothing needs to be approximate: the job starts again from nothing."""
    job = start(small, trap("step", 1, "hold"), trap("step", 2, "hold"))
    strike([sprung(job, 0), sprung(job, 1)])
    assert ended_well(job, reference, killed=(1, 2))["restarts"] == 1


def test_a_rank_that_never_survives_the_build_ends_the_job(small: Cluster) -> None:
    record = failure(start(small, trap("build", 0, "kill", always=True), nnodes=1))
    assert record["restarts"] == 2
    assert "has already started 3 times, which is the limit" in record["reason"]
    assert record["exit_code"] != 0


def test_a_rank_lost_after_the_last_step_is_not_a_success(small: Cluster) -> None:
    """It may have been writing its last checkpoint. No standby can help: there is nothing left to train."""
    job = start(small, trap("end", 1, "kill"), nnodes=2, standby=1)
    record = failure(job)
    assert "rank 1" in record["reason"]
    assert "was lost after the last step" in record["reason"]
    assert record["exit_code"] != 0
    assert job.migrations() == []
    assert written(job) == STEPS - 1


def assert_ended_by_its_script(job: Job, *words: str) -> None:
    """The job has failed and says why in these words; no standby was used."""
    record = failure(job)
    assert record["exit_code"] == 1
    shown = " ".join(job.cluster.tmctl("job", "show", job.id).output.split())
    for word in words:
        assert word in record["reason"]
        assert word in shown, shown
    assert job.migrations() == []
    assert record["epoch"] == 0
    assert {agent["exit_code"] for agent in job.agents()} == {1}


def test_an_exception_in_one_rank_ends_the_job_with_its_traceback(small: Cluster) -> None:
    job = start(small, trap("step", 1, "raise", step=4), nnodes=2, standby=1)
    assert_ended_by_its_script(job, "rank 1", "ValueError: the user's own bug", "Traceback (most recent call last)")
    assert "ValueError: the user's own bug" in job.logs()
    assert written(job) == 3


def test_a_rank_that_leaves_early_ends_the_job_and_the_reason_says_how_it_left(small: Cluster) -> None:
    job = start(small, trap("step", 0, "exit", step=4), nnodes=2, standby=1)
    assert_ended_by_its_script(job, "rank 0", "sys.exit(3) before its last step")


def test_survivors_hold_for_so_long_and_then_leave(impatient: Cluster) -> None:
    job = start(impatient, trap("step", 1, "hold", step=4), nnodes=2)
    strike([sprung(job, 0), running_agents(job)[job.node_of(1)]])
    until(lambda: "waiting for a standby" in job.view()["sentence"], "the job says what it waits for")
    record = failure(job)
    assert record["exit_code"] == EXIT_GIVEN_UP
    assert f"no standby came in {HOLD_LIMIT_S:g} s" in record["reason"]
    assert EXIT_GIVEN_UP in {agent["exit_code"] for agent in job.agents()}


def test_survivors_hold_without_a_daemon_and_then_leave(impatient: Cluster) -> None:
    """So that whoever launched the job can queue it again; the daemon learns of it when it is back."""
    job = start(impatient, trap("step", 1, "hold", step=4), nnodes=2)
    wait_written(job, 1)
    pid, agents = sprung(job, 0), running_agents(job)
    impatient.stack.kill()
    strike([pid])
    until(lambda: not set(agents.values()) & set(marked()), "all agents are gone")
    assert "without word from the tmd daemon" in job.logs()
    impatient.stack.start()
    assert failure(job)["exit_code"] != 0
