"""kill -9 of the daemon at any moment: the next life carries on from the ledger and what the agents say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.daemon_rig import Cluster


def running(**settings: Any) -> Cluster:
    cluster = Cluster(nnodes=3, standbys=2, **settings)
    cluster.train(5)
    return cluster


def restart(cluster: Cluster) -> None:
    cluster.restart_daemon()
    cluster.reconnect()


def test_a_running_job_does_not_notice() -> None:
    cluster = running()
    before = {name: (rank.core.live_epoch, rank.core.poisoned_epoch) for name, rank in cluster.ranks.items()}
    cluster.restart_daemon()
    cluster.train(3)
    cluster.reconnect()
    cluster.train(3)
    assert {name: (rank.core.live_epoch, rank.core.poisoned_epoch) for name, rank in cluster.ranks.items()} == before
    assert all(rank.alive for rank in cluster.ranks.values())
    cluster.kill_rank(1)
    cluster.train(2)


def test_the_first_deadline_of_a_new_life_is_now() -> None:
    cluster = running()
    cluster.restart_daemon()
    assert cluster.daemon.next_deadline() == 0.0
    cluster.do(cluster.daemon.tick(cluster.now))
    assert cluster.daemon.next_deadline() == cluster.now + 5.0
    assert cluster.sentence() == "the daemon has restarted: waiting for the agents of n0, n1, n2"


def test_nothing_is_decided_before_the_agents_are_back() -> None:
    """A rank of n2 died meanwhile; n0's word alone would be half the truth."""
    cluster = running()
    cluster.restart_daemon()
    cluster.member(2).die()
    cluster.reconnect("n0", "n2")
    assert cluster.job.state == "running"
    cluster.reconnect("n1", "n3", "n4")
    assert cluster.job.epoch == 1
    cluster.train(2)


def test_an_agent_that_does_not_come_back_is_lost_after_the_grace() -> None:
    cluster = running()
    cluster.restart_daemon()
    for rank in cluster.agents["n1"].ranks():
        rank.die()
    cluster.agents["n1"].stopped = True
    cluster.reconnect()
    assert cluster.job.state == "running"
    cluster.pass_time(9)
    assert cluster.migration().leavers == {1: "j.2"}
    cluster.train(2)


@pytest.mark.parametrize("held", ["links", "state"])
def test_a_recovery_goes_on_with_the_recorded_resolution_under_a_new_epoch(held: str) -> None:
    cluster = running()
    cluster.held.add(held)
    cluster.kill_rank(1)
    resolution, limit = cluster.job.resolution, cluster.job.epoch_limit
    restart(cluster)
    cluster.held.clear()
    cluster.settle()
    cluster.pass_time(40)
    assert cluster.job.state == "running"
    assert (cluster.job.resolution, cluster.job.epoch > limit) == (resolution, True)
    cluster.train(3)
    cluster.pass_time(1)
    assert cluster.migration().state == "done"


def test_a_plan_before_the_flip_is_carried_on() -> None:
    cluster = running()
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    restart(cluster)
    cluster.train(3)
    assert cluster.ledger.migrations[migration_id].state == "done"
    assert cluster.job.poison_epoch == -1


def test_a_flip_that_happened_meanwhile_is_completed() -> None:
    cluster = running()
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    cluster.restart_daemon()
    cluster.train(3)
    cluster.reconnect()
    assert cluster.ledger.migrations[migration_id].state == "done"
    assert (cluster.job.epoch, cluster.job.poison_epoch) == (1, -1)
    assert cluster.released == ["n1"]


def test_a_plan_that_was_being_called_off_stays_called_off() -> None:
    cluster = running()
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    leaver = cluster.member(1)
    leaver.stopped = True
    cluster.do(cluster.daemon.abort_migration(cluster.now, migration_id, "root"))
    restart(cluster)
    leaver.stopped = False
    cluster.pass_time(1)
    assert cluster.ledger.migrations[migration_id].state == "aborted"
    assert cluster.ledger.migrations[migration_id].reason == "called off by root"
    cluster.train(2)


def test_a_job_that_was_forming_goes_on_forming() -> None:
    cluster = Cluster(nnodes=2, start=False)
    cluster.join("n0")
    restart(cluster)
    cluster.join("n1")
    assert cluster.job.state == "running"
    assert cluster.incarnations() == ["j.1", "j.2"]


def test_a_job_that_finished_meanwhile_is_done() -> None:
    cluster = running()
    members = [cluster.member(rank) for rank in range(3)]
    cluster.restart_daemon()
    for process in members:
        process.at = "end"
        process.carry_out(process.core.finished())
        process.die(0)
    cluster.reconnect()
    assert cluster.job.state == "done"


def test_the_end_of_a_job_is_told_again() -> None:
    cluster = running()
    cluster.restart_daemon()
    cluster.do(cluster.daemon.cancel_job(cluster.now, "j", "root"))
    cluster.restart_daemon()
    cluster.reconnect()
    assert all(agent.job_over is not None for agent in cluster.agents.values())


def test_pause_outlives_the_daemon() -> None:
    cluster = running()
    cluster.do(cluster.daemon.set_paused(cluster.now, True, "root"))
    restart(cluster)
    assert cluster.daemon.paused
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    assert cluster.daemon.sentences()[migration_id] == "queued: tmd is paused"


def test_a_node_that_rebooted_while_the_daemon_was_away_has_lost_its_rank_and_nothing_else() -> None:
    """The ledger names the agent of the node's earlier life, which will never say hello again."""
    cluster = running()
    cluster.disconnect("n1")
    cluster.kill_node("n1")
    cluster.restart_daemon()
    cluster.join("n1")
    cluster.reconnect("n0", "n2", "n3", "n4")
    cluster.pass_time(10.0)
    assert cluster.job.state == "running"
    cluster.train(2)
    assert cluster.migration().state == "done"
    assert list(cluster.migration().leavers) == [1]
