"""The joiner or the leaver of a planned move is killed, in each of its phases: nothing is half done, no step is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Job, until
from tests.e2e.losses_rig import LongJob, stayers


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    with Cluster(tmp_path_factory.mktemp("partners"), nodes=7) as cluster:
        yield LongJob(cluster, reference, standbys=1, spares=3)


@pytest.fixture
def job(moving: LongJob) -> Iterator[Job]:
    """Whole and running; after the test every step was committed with the right result."""
    job = moving.whole()
    yield job
    job.faults.disarm()
    job.wait_progress()
    moving.assert_unharmed()


def ended(job: Job, migration_id: str) -> dict[str, Any]:
    record = until(lambda: (found := job.migration(migration_id))["ended_s"] is not None and found, f"{migration_id} has ended")
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize(("phase", "point"), [("preparing", "role.taken"), ("installing", "staged")])
def test_a_joiner_that_dies_before_the_flip_is_replaced_by_another_standby(job: Job, phase: str, point: str) -> None:
    before, epoch = job.pids(), job.record()["epoch"]
    fault = job.faults.arm("stop", point, 1)
    migration_id = job.request("--rank", "1")
    joiner = fault.stopped_pid()
    until(lambda: job.migration(migration_id)["state"] == phase, f"the daemon knows that it is {phase}")
    record = job.migration(migration_id)
    os.kill(joiner, signal.SIGKILL)
    done = job.wait_measured(migration_id)
    assert (done["attempt"], done["steps_redone"], done["stayer_links_reopened"]) == (2, 0, 0)
    assert done["joiners"] != record["joiners"]
    told = {event["kind"]: event["text"] for event in job.story(migration_id)}
    assert f"the joiner {record['joiners']['1']}" in told["withdrawn"]
    assert "was lost: killed by SIGKILL" in told["withdrawn"] or "its process is dying" in told["withdrawn"]
    assert "attempt 2" in told["retry"]
    assert stayers(before, job.pids()) == {0, 2, 3}
    assert job.record()["epoch"] > epoch


@pytest.mark.parametrize("point", ["state.loading", "state.copying", "state.loaded"])
def test_when_the_joiner_dies_after_the_flip_the_leaver_goes_on(job: Job, point: str) -> None:
    """Right after the flip, in the middle of the copy, and with the whole state but before its first step."""
    before, epoch = job.pids(), job.record()["epoch"]
    fault = job.faults.arm("kill", point, 2)
    migration_id = job.request("--rank", "2")
    fault.pid()
    record = ended(job, migration_id)
    assert record["state"] == "aborted"
    assert record["reason"].startswith("an unplanned failure came first: ")
    assert record["joiners"]["2"] in record["reason"]
    until(lambda: job.record()["epoch"] > epoch + 1 and job.record()["state"] == "running", "the leaver's epoch runs")
    job.wait_progress()
    assert job.pids() == before
    assert [each["kind"] for each in job.migrations() if each["started_s"] > record["started_s"]] == []
    assert "flipped" in job.kinds(migration_id)


def test_a_joiner_that_freezes_after_the_flip_is_not_waited_for(job: Job) -> None:
    before = job.pids()
    fault = job.faults.arm("stop", "state.loading", 1)
    migration_id = job.request("--rank", "1")
    joiner = fault.stopped_pid()
    record = ended(job, migration_id)
    assert record["state"] == "aborted"
    assert "has said nothing for" in record["reason"]
    job.wait_progress()
    assert job.pids() == before
    until(lambda: not Path(f"/proc/{joiner}").exists(), "the frozen joiner is gone")


@pytest.mark.parametrize("point", ["role.taken", "staged", "state.copying"])
def test_a_leaver_that_dies_while_its_joiner_gets_ready(moving: LongJob, job: Job, point: str) -> None:
    """While the joiner takes the role, while links are staged, and frozen after the flip in the middle of the copy: the joiner is
    held at that point, the leaver is killed, the joiner goes on."""
    before, leaver = job.pids(), job.rank(2)["record"]["incarnation"]
    fault = job.faults.arm("stop", point, 2)
    migration_id = job.request("--rank", "2")
    joiner = fault.stopped_pid()
    state = {"role.taken": "preparing", "staged": "installing"}.get(point, "copying")
    until(lambda: job.migration(migration_id)["state"] == state, f"the daemon knows that it is {state}")
    moving.kill(before[2], rank=2)
    os.kill(joiner, signal.SIGCONT)
    recovery = moving.replaced(2)
    assert recovery["leavers"] == {"2": leaver}
    record = ended(job, migration_id)
    assert record["state"] == "aborted"
    assert "an unplanned failure came first" in record["reason"]
    assert stayers(before, job.pids()) == {0, 1, 3}


@pytest.mark.parametrize(("point", "rank"), [("flag.raised", 2), ("flag.raised", 0), ("frozen", 2)])
def test_a_leaver_that_dies_at_the_flip(moving: LongJob, job: Job, point: str, rank: int) -> None:
    """Right after raising its flag, so that the vote may flip or break, and right after the flip. Rank 0 is the root of the
    vote: it raises its flag in what it decides."""
    before, leaver = job.pids(), job.rank(rank)["record"]["incarnation"]
    fault = job.faults.arm("kill", point, rank)
    migration_id = job.request("--rank", str(rank))
    assert fault.pid() == before[rank]
    moving.kills[rank] += 1
    record = ended(job, migration_id)
    job.wait_progress()
    assert record["state"] in ("aborted", "done")
    assert stayers(before, job.pids()) == {0, 1, 2, 3} - {rank}
    assert job.rank(rank)["record"]["incarnation"] != leaver
    if record["state"] == "aborted":
        assert "an unplanned failure came first" in record["reason"]
        # The buddy has the record of the last vote; frozen, the leaver had not said yet that nothing changed since.
        assert moving.replaced(rank)["record_origin"] in ("exact", "assumed")
