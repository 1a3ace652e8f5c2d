"""The end of a job: in good order, with losses after the last step, and by an operator's word."""

from __future__ import annotations

from typing import Any

from tests.core.daemon_rig import Cluster


def running(**settings: Any) -> Cluster:
    cluster = Cluster(nnodes=3, standbys=1, **settings)
    cluster.train(5)
    return cluster


def test_a_job_is_done_when_every_rank_has_finished_and_left_with_code_0() -> None:
    cluster = running()
    cluster.finish(0, 1)
    assert (cluster.job.state, cluster.sentence()) == ("finishing", "finishing: 1 of 3 ranks still run")
    cluster.finish(2)
    assert (cluster.job.state, cluster.job.exit_code) == ("done", 0)
    assert all(agent.job_over is not None and agent.job_over.exit_code == 0 for agent in cluster.agents.values())
    assert sorted(cluster.released) == ["n0", "n1", "n2", "n3"]


def test_a_script_without_steps_is_done_when_all_its_ranks_leave_with_code_0() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    for rank in (0, 1):
        cluster.member(rank).die(0)
    cluster.settle()
    assert cluster.job.state == "done"


def test_a_rank_lost_after_the_last_step_is_not_replaced_and_the_job_says_so_in_the_end() -> None:
    cluster = running()
    cluster.finish(0)
    process = cluster.member(1)
    process.at = "end"
    process.carry_out(process.core.finished())
    process.die()
    cluster.settle()
    assert cluster.job.state == "finishing"
    cluster.finish(2)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 1)
    assert cluster.job.reason == "rank 1 on n1 was lost after the last step (killed by SIGKILL)"
    assert not cluster.ledger.migrations


def test_a_finished_rank_decides_the_last_step_for_all() -> None:
    """1. the last vote says yes; 2. rank 0 alone learns it, finishes and leaves; 3. the others hold, and are told its step."""
    cluster = running()
    cluster.agents["n1"].stopped = cluster.agents["n2"].stopped = True
    assert cluster.vote(unknown=(1, 2))
    cluster.finish(0)
    cluster.agents["n1"].stopped = cluster.agents["n2"].stopped = False
    cluster.settle()
    assert cluster.sentence() == "finishing: 2 of 3 ranks still run"
    assert cluster.job.resolution is not None
    assert cluster.job.resolution.target_step == 6
    assert {cluster.member(rank).core.next_step for rank in (1, 2)} == {6}
    cluster.finish(1, 2)
    assert cluster.job.state == "done"


def test_a_rank_that_leaves_early_while_others_need_it_ends_the_job() -> None:
    cluster = running(report_timeout_s=2.0)
    cluster.kill_rank(1, exit_code=0)
    assert cluster.job.state == "finishing"
    cluster.pass_time(3)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 1)
    assert cluster.job.reason == "rank 1 left at step 5 although the others still had steps to run"


def test_an_operator_ends_a_job() -> None:
    cluster = running()
    cluster.do(cluster.daemon.cancel_job(cluster.now, "j", "root"))
    assert (cluster.job.state, cluster.job.exit_code, cluster.job.reason) == ("failed", 143, "cancelled by root")


def test_a_plan_that_has_not_flipped_ends_with_the_job() -> None:
    cluster = running()
    cluster.held.add("staging")
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    cluster.finish(0, 1, 2)
    assert cluster.job.state == "done"
    assert cluster.ledger.migrations[migration_id].state == "aborted"
    assert cluster.ledger.migrations[migration_id].reason == "the job had finished before it was done"
