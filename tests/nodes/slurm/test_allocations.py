"""What a job of Slurm means to tmd."""

from __future__ import annotations

from typing import Any

import pytest

from tmd.nodes.slurm.allocations import allocation
from tmd.nodes.slurm.records import SlurmJob


def job(**changes: Any) -> SlurmJob:
    values: dict[str, Any] = {
        "job_id": "7",
        "state": "RUNNING",
        "uid": 1000,
        "user": "alice",
        "restart_count": 0,
        "end_s": 900.0,
        "batch_host": "n1",
        "nodes": ("n10", "n1", "n2"),
        "reason": "",
        "admin_comment": "",
    }
    return SlurmJob(**{**values, **changes})


@pytest.mark.parametrize(("state", "means"), [("RUNNING", "running"), ("RESIZING", "running"), ("SUSPENDED", "suspended")])
def test_a_job_that_has_its_nodes(state: str, means: str) -> None:
    word = allocation("7", "0", job(state=state))
    assert (word.state, word.nodes, word.batch_host, word.ends_s) == (means, ("n1", "n10", "n2"), "n1", 900.0)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETED"])
def test_a_job_that_ends_is_over_whatever_it_still_holds(state: str) -> None:
    word = allocation("7", "0", job(state=state))
    assert (word.state, word.nodes, word.reason) == ("over", (), f"Slurm calls the job {state}")


def test_a_requeued_job_is_another_one() -> None:
    assert allocation("7", "0", job(restart_count=1)).state == "over"
    assert allocation("7", "0", job(state="PENDING", restart_count=1)).reason == "Slurm has requeued the job"
    assert allocation("7.1", "1", job(restart_count=1)).state == "running"
