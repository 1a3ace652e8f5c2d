"""A job that ends soon, by its time limit or because it was preempted: nothing is begun that could not end before."""

from __future__ import annotations

import pytest

from tests.core.daemon_rig import Cluster
from tests.core.test_daemon_allocation import drain, running
from tmd.core.requests import Refused


def told(cluster: Cluster, kind: str) -> list[str]:
    return [event.text for event in cluster.ledger.events if event.kind == kind]


def test_no_move_begins_that_would_not_end_before_the_job_s_time() -> None:
    cluster = running()
    cluster.allocate(ends_s=cluster.now + 8.0)
    drain(cluster, "n1")
    cluster.train(3)
    assert not cluster.ledger.migrations
    assert cluster.daemon.sentences()["n1"].startswith("draining: its ranks stay: the job's time ends in ")
    assert any(text.startswith("drain of n1: bad DIMM: rank 1 stays: the job's time ends") for text in told(cluster, "notice"))
    with pytest.raises(Refused, match="too late to move ranks of job j: the job's time ends in 8 s, and a move takes 10 s"):
        cluster.daemon.request_migration(cluster.now, "j", rank=0, who="root")


def test_more_time_lets_it_begin() -> None:
    cluster = running()
    cluster.allocate(ends_s=cluster.now + 8.0)
    drain(cluster, "n1")
    cluster.allocate(ends_s=cluster.now + 3600.0)
    cluster.train(3)
    assert cluster.migration().state == "done"


def test_a_job_that_outlives_its_time_moves_again() -> None:
    cluster = running()
    cluster.allocate(ends_s=cluster.now + 1.0)
    drain(cluster, "n1")
    cluster.pass_time(50.0)
    assert not cluster.ledger.migrations
    cluster.pass_time(12.0)
    cluster.train(3)
    assert cluster.migration().state == "done"


def test_slow_steps_need_more_time() -> None:
    cluster = running()
    for _ in range(12):
        cluster.pass_time(19.9)
        cluster.train(1)
    cluster.allocate(ends_s=cluster.now + 60.0)
    drain(cluster, "n1")
    assert "a move takes 100 s" in cluster.daemon.sentences()["n1"]


def test_a_queued_move_that_has_become_too_late_is_aborted_with_the_reason() -> None:
    cluster = running()
    cluster.do(cluster.daemon.set_paused(cluster.now, True, "root"))
    drain(cluster, "n1")
    assert cluster.migration().state == "queued"
    cluster.allocate(ends_s=cluster.now + 5.0)
    cluster.do(cluster.daemon.set_paused(cluster.now, False, "root"))
    assert cluster.migration().state == "aborted"
    assert "the job's time ends in 5 s" in cluster.migration().reason


def test_a_preempted_job_is_told_of_once_and_moves_nothing_any_more() -> None:
    cluster = running()
    word = {"preempted_s": cluster.now, "ends_s": cluster.now + 300.0}
    cluster.allocate(**word)
    cluster.allocate(**word, reason="asked again")
    assert told(cluster, "preempted") == [
        "the resource manager has preempted the job and ends it in 300 s at the latest; the ranks were told with SIGTERM, and "
        "nothing is moved any more"
    ]
    assert told(cluster, "notice") == [], "not as if its own time were up"
    drain(cluster, "n1")
    cluster.train(2)
    assert not cluster.ledger.migrations
    assert "preempted" in cluster.daemon.sentences()["n1"]


def test_no_agent_is_started_in_a_preempted_job() -> None:
    cluster = Cluster(allocated=True, start=False)
    for index in range(3):
        cluster.join(f"n{index}")
    cluster.allocate(preempted_s=cluster.now, ends_s=cluster.now + 300.0)
    cluster.pass_time(1.0)
    assert cluster.order("launch") is None


def test_a_preempted_job_whose_ranks_have_ended_waits_for_slurm_s_word() -> None:
    cluster = running()
    cluster.allocate(preempted_s=cluster.now, ends_s=cluster.now + 300.0)
    for process in [*map(cluster.member, range(3)), cluster.standby_on("n3")]:
        process.die(-15)
    cluster.settle()
    cluster.pass_time(1.0)
    assert cluster.job.state not in ("done", "failed")
    cluster.allocate(state="over", reason="Slurm calls the job COMPLETED")
    assert cluster.job.reason == "it was preempted: its allocation has ended: Slurm calls the job COMPLETED"
