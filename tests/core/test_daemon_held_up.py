"""The daemon itself was away for a while: nobody is blamed for what it did not hear."""

from __future__ import annotations

from tests.core.daemon_rig import Cluster

HELD_UP_S = 60.0


def test_a_daemon_that_was_held_up_gives_up_nobody_who_waited() -> None:
    """
    1. A rank dies and there is no standby: the survivors hold, so nothing but their agents' words shows that they live.
    2. The daemon is held up for longer than every deadline on silence; then the agents are heard, one after the other.
    """
    cluster = Cluster(nnodes=4, standbys=0)
    cluster.train(3)
    cluster.kill_node("n1")
    cluster.now += HELD_UP_S
    cluster.daemon.held_up(cluster.now, HELD_UP_S)
    cluster.pass_time(10.0)
    assert not any(agent.refused for node, agent in cluster.agents.items() if node != "n1")
    cluster.join("n4")
    cluster.train(2)
    assert cluster.job.state == "running"
    assert cluster.job.approximations == ()


def test_reports_that_waited_count_although_their_deadline_has_passed() -> None:
    cluster = Cluster(nnodes=4, standbys=1, report_timeout_s=10.0)
    cluster.train(3)
    cluster.stop_node("n0")
    cluster.kill_rank(1)
    assert "waiting for the report of rank 0" in cluster.sentence()
    cluster.now += HELD_UP_S
    cluster.daemon.held_up(cluster.now, HELD_UP_S)
    cluster.do(cluster.daemon.tick(cluster.now))
    cluster.stop_node("n0", stopped=False)
    cluster.pass_time(1.0)
    cluster.train(2)
    assert list(cluster.migration().leavers) == [1]


def test_after_a_hold_up_silence_counts_again() -> None:
    cluster = Cluster(nnodes=4, standbys=1, heartbeat_timeout_s=3.0)
    cluster.train(3)
    cluster.stop_node("n2")
    cluster.now += HELD_UP_S
    cluster.daemon.held_up(cluster.now, HELD_UP_S)
    cluster.pass_time(1.0)
    assert cluster.job.epoch == 0
    cluster.pass_time(4.0)
    assert list(cluster.migration().leavers) == [2]


def test_a_restarted_daemon_judges_a_job_although_it_hears_of_something_else_first() -> None:
    """All of the job's agents have left meanwhile; the resource manager's word about another node is the first event."""
    cluster = Cluster(nnodes=2, standbys=0, hold_limit_s=30.0)
    cluster.train(3)
    cluster.restart_daemon()
    cluster.do(cluster.daemon.node_state(cluster.now, "n9", "up", ""))
    for _ in range(60):
        cluster.now += 1.0
        deadline = cluster.daemon.next_deadline()
        if deadline is not None and deadline <= cluster.now:
            cluster.do(cluster.daemon.tick(cluster.now))
    assert cluster.job.state == "failed"
    assert cluster.job.exit_code == 75
