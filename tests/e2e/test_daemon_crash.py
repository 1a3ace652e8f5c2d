"""The daemon is killed, stopped, or cannot write, at every stage of what it decides: training goes on, and once the daemon is
back it carries on; nothing stays between."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Job, assert_unharmed, marked, until
from tests.e2e.losses_rig import LongJob, continue_stopped, stayers, wait_written, written
from tmd.cli.client import ClientError

HEARTBEAT_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    core = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    with Cluster(tmp_path_factory.mktemp("crashes"), nodes=5, core=core) as cluster:
        yield LongJob(cluster, reference, standbys=1)


@pytest.fixture
def job(crashing: LongJob) -> Job:
    """Whole and running, with a standby ready, under a daemon that is there even if the last test has failed without it."""
    try:
        crashing.cluster.stack.client.get("/v1/health")
    except ClientError:
        crashing.cluster.stack.start()
    return crashing.whole()


def identity(job: Job) -> tuple[Any, ...]:
    """What changes with every recovery and every move."""
    until(lambda: all(each["connected"] and each["pid"] for each in job.view()["ranks"]), "every rank's agent has reported")
    record = job.record()
    return job.pids(), record["epoch"], record["epoch_limit"], len(job.migrations())


def wait_for_move(job: Job, move: str) -> dict[str, Any]:
    """The record of a planned move that has ended, one way or the other."""
    record: dict[str, Any] = until(lambda: (found := job.migration(move))["ended_s"] is not None and found, f"{move} has ended")
    assert record["state"] in ("done", "aborted")
    assert record["reason"]
    return record


def test_no_step_stops_while_the_daemon_is_killed_and_started_again(crashing: LongJob, job: Job) -> None:
    before = identity(job)
    crashing.cluster.stack.kill()
    wait_written(job, 30)
    crashing.cluster.stack.start()
    wait_written(job, 30)
    job.wait_progress()
    assert identity(job) == before
    assert "the daemon has restarted and carries on; all its agents are back" in [each["text"] for each in job.story(job.id)]
    crashing.assert_unharmed()


def test_no_step_stops_while_the_daemon_hears_and_says_nothing(crashing: LongJob, job: Job) -> None:
    """Stopped for longer than every deadline on silence."""
    before, daemon = identity(job), crashing.cluster.stack.pid
    os.kill(daemon, signal.SIGSTOP)
    since_s = time.monotonic()
    try:
        until(lambda: time.monotonic() - since_s > HEARTBEAT_TIMEOUT_S + 0.5, "its deadlines have passed", every_s=0.1)
        wait_written(job, 5)
    finally:
        continue_stopped(daemon)
    job.wait_progress()
    assert identity(job) == before
    crashing.assert_unharmed()


def test_a_rank_dies_while_the_daemon_is_away(crashing: LongJob, job: Job) -> None:
    """1. The daemon dies. 2. A rank dies: the survivors hold. 3. The daemon is back: the rank is replaced."""
    before = job.pids()
    crashing.cluster.stack.kill()
    crashing.kill(before[2], rank=2)
    until(lambda: before[2] not in marked(), "the rank is gone")
    at = written(job)
    crashing.cluster.stack.start()
    crashing.recovered(2)
    assert stayers(before, job.pids()) == {0, 1, 3}
    assert at <= max(row["step"] for row in job.rows() if row["pid"] == before[2]) + 1, "the survivors went on alone"


def test_the_daemon_dies_before_every_survivor_has_reported(crashing: LongJob, job: Job) -> None:
    survivor = job.pids()[0]
    os.kill(survivor, signal.SIGSTOP)
    try:
        crashing.kill_rank(2)
        until(lambda: "waiting for the report of rank 0" in job.view()["sentence"], "the recovery waits for rank 0")
        crashing.cluster.stack.kill()
    finally:
        continue_stopped(survivor)
    crashing.cluster.stack.start()
    crashing.recovered(2)


@pytest.mark.parametrize("moment", ["install.received", "go.received"])
def test_the_daemon_dies_when_a_survivor_has_its_word(crashing: LongJob, job: Job, moment: str) -> None:
    """The epoch is being installed, or the word to go on is out; rank 0 has just read it and says nothing yet."""
    fault = job.faults.arm("stop", moment, 0)
    crashing.kill_rank(3)
    stopped = fault.stopped_pid()
    crashing.cluster.stack.kill()
    continue_stopped(stopped)
    crashing.cluster.stack.start()
    crashing.recovered(3)


@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        pytest.param("staged", 2, id="a stayer has staged its links"),
        pytest.param("flag.raised", 1, id="the leaver has raised its flag"),
        pytest.param("flip", 2, id="a stayer flips"),
        pytest.param("frozen", 1, id="the leaver is frozen"),
        pytest.param("state.loading", 1, id="the joiner takes the state"),
    ],
)
def test_the_daemon_dies_during_a_planned_move(crashing: LongJob, job: Job, moment: str, rank: int) -> None:
    fault = job.faults.arm("stop", moment, rank)
    move = job.request("--rank", "1")
    stopped = fault.stopped_pid()
    crashing.cluster.stack.kill()
    continue_stopped(stopped)
    crashing.cluster.stack.start()
    record = wait_for_move(job, move)
    job.wait_progress()
    crashing.assert_unharmed()
    assert job.record()["state"] == "running"
    holder = record["joiners" if record["state"] == "done" else "leavers"]["1"]
    assert job.rank(1)["record"]["incarnation"] == holder


def test_the_ledger_is_locked_while_a_rank_is_lost(crashing: LongJob, job: Job) -> None:
    """Training does not need the ledger; a decision does: it waits, and is carried out once it can be written."""
    (ledger,) = crashing.cluster.stack.folder.glob("state/*.db")
    with contextlib.closing(sqlite3.connect(ledger, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        wait_written(job, 10)
        crashing.kill_rank(0)
        log = crashing.cluster.stack.log
        until(lambda: "the ledger cannot be written" in log.read_text(), "the daemon says that it cannot write")
        at = written(job)
        other.execute("ROLLBACK")
    crashing.recovered(0)
    assert written(job) > at


def test_the_daemon_dies_again_and_again_while_a_job_starts(crashing: LongJob) -> None:
    crashing.end()
    stack = crashing.cluster.stack
    crashing.cluster.tidy()
    job = crashing.cluster.start_job(steps=30, pace_ms=0)
    for state in ("forming", "installing", "running"):
        job.wait_state(state, "running", "finishing", "done")
        stack.kill()
        stack.start()
    job.wait_state("done")
    assert job.record()["restarts"] == 0
    assert_unharmed(job, crashing.reference)
    job.wait_gone()
