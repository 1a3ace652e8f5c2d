"""A daemon is started on an empty ledger while a job runs: the job trains on without it, and is picked up again once the old
ledger is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Job, marked, until


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=3) as cluster:
        yield cluster


def steps_written(job: Job) -> int:
    return max((row["step"] for row in job.rows()), default=-1)


def swap_ledger(cluster: Cluster, *, away: str, back: str) -> None:
    """kill -9 of the daemon, and another one on another ledger: the present one is set aside as `away`."""
    state, aside = cluster.folder / "stack" / "state", cluster.folder / away
    cluster.stack.kill()
    aside.mkdir()
    for file in state.glob("ledger.db*"):
        file.rename(aside / file.name)
    if back:
        for file in (cluster.folder / back).iterdir():
            file.rename(state / file.name)
    cluster.stack.start()


def test_a_job_outlives_a_daemon_on_an_empty_ledger(alone: Cluster) -> None:
    job = alone.start_job(nnodes=2, standby=1, steps=5000)
    job.wait_ready(1)
    pids = job.pids()
    everybody = {*marked()} - {alone.stack.pid}
    swap_ledger(alone, away="old", back="")
    before = steps_written(job)
    told = f"job {job.id} runs under another ledger, this one does not know it"
    until(lambda: alone.ask("status")["sentences"].get(job.id, "").startswith(told), "the daemon says whose the job is")
    assert told in alone.refusal("job", "show", job.id)
    until(lambda: steps_written(job) >= before + 100, "training goes on")
    assert everybody <= {*marked()}, "somebody was killed"
    until(lambda: job.logs().count("is not this job's") == 3, "every agent says so")

    swap_ledger(alone, away="empty", back="old")
    job.wait_progress()
    until(lambda: job.pids() == pids, "the same processes are heard again")
    assert job.record()["epoch"] == 0
    job.wait_ready(1)
    migration_id = job.request("--rank", "1")
    assert job.wait_measured(migration_id)["state"] == "done"
    job.cancel()
