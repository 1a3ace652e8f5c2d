"""How a job comes together: places, epoch 0, standbys, and losses before there is anything to recover."""

from __future__ import annotations

import pytest

from tests.core.daemon_rig import Cluster


def test_nodes_take_their_ranks_in_order_of_arrival_and_further_ones_are_standbys() -> None:
    cluster = Cluster(nnodes=2, nproc=2, standbys=1)
    view = cluster.daemon.job("j")
    assert view is not None
    assert [(rank.record.rank, rank.record.node, rank.record.local_rank) for rank in view.ranks] == [
        (0, "n0", 0),
        (1, "n0", 1),
        (2, "n1", 0),
        (3, "n1", 1),
    ]
    assert [(standby.record.node, standby.phase) for standby in view.standbys] == [("n2", "ready"), ("n2", "ready")]
    assert {node.record.node: node.record.use for node in cluster.daemon.nodes()} == {
        "n0": "training",
        "n1": "training",
        "n2": "standby",
    }


def test_a_node_index_decides_the_place_whatever_the_order_of_arrival() -> None:
    cluster = Cluster(nnodes=2, start=False)
    for node, index in (("late", 2), ("second", 1), ("first", 0)):
        cluster.join(node, node_index=index)
    view = cluster.daemon.job("j")
    assert view is not None
    assert [rank.record.node for rank in view.ranks] == ["first", "second"]
    assert [standby.record.node for standby in view.standbys] == ["late"]


def test_the_sentence_counts_the_nodes_that_are_missing() -> None:
    cluster = Cluster(nnodes=3, start=False)
    cluster.join("n0")
    assert cluster.sentence() == "waiting for 2 more nodes (3 train)"
    cluster.join("n1")
    assert cluster.sentence() == "waiting for 1 more node (3 train)"


def test_nobody_builds_before_every_rank_is_linked_and_that_is_in_the_ledger() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False)
    cluster.held.add("links")
    cluster.join("n0")
    cluster.join("n1")
    assert (cluster.job.state, cluster.job.epoch, cluster.job.epoch_limit) == ("installing", -1, 0)
    assert {rank.core.phase for rank in cluster.ranks.values()} == {"starting"}
    cluster.held.clear()
    for rank in cluster.ranks.values():
        rank.carry_out(rank.core.links_ready(0, 4))
    cluster.settle()
    assert (cluster.job.state, cluster.job.epoch) == ("running", 0)
    cluster.train()


def test_standbys_rehearse_with_the_last_rank_once_the_job_builds() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    standby = cluster.standby_on("n2")
    assert cluster.directive(standby.core.incarnation).rehearse_from.incarnation == cluster.incarnations()[1]
    assert standby.core.phase == "ready"


def test_a_rank_that_dies_before_the_start_is_started_again_alone() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False)
    cluster.held.add("links")
    cluster.join("n0")
    cluster.join("n1")
    before = cluster.incarnations()
    cluster.held.clear()
    cluster.kill_rank(1)
    after = cluster.incarnations()
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert (cluster.job.state, cluster.job.epoch, cluster.job.restarts) == ("running", 1, 0)


def test_a_node_that_is_lost_before_the_start_is_replaced_by_a_standby_node() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False)
    cluster.join("n0")
    cluster.held.add("links")
    cluster.join("n1")
    cluster.join("n2")
    cluster.kill_node("n1")
    cluster.held.clear()
    cluster.pass_time(3)
    view = cluster.daemon.job("j")
    assert view is not None
    assert [rank.record.node for rank in view.ranks] == ["n0", "n2"]
    assert cluster.job.state == "running"


def test_a_rank_that_cannot_live_before_the_start_ends_the_job() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False, restart_limit=2)
    cluster.held.add("links")
    cluster.join("n0")
    cluster.join("n1")
    for _ in range(3):
        cluster.kill_rank(1)
    assert cluster.job.state == "failed"
    assert "rank 1 was lost 3 times before the job had started" in cluster.job.reason


@pytest.mark.parametrize("held", ["build", "warm"])
def test_a_loss_while_somebody_still_builds_starts_the_job_from_nothing(held: str) -> None:
    """A build cannot be rolled back: its broadcasts have half happened."""
    cluster = Cluster(nnodes=3, standbys=1, start=False)
    cluster.held.add(held)
    for index in range(4):
        cluster.join(f"n{index}")
    before = cluster.incarnations()
    cluster.kill_rank(1)
    cluster.held.clear()
    cluster.settle()
    assert set(cluster.incarnations()).isdisjoint(before)
    assert (cluster.job.state, cluster.job.restarts) == ("running", 1)
    assert cluster.job.epoch > 0
    cluster.train(3)


def test_starting_from_nothing_has_a_limit() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False, restart_limit=1)
    cluster.held.add("warm")
    cluster.join("n0")
    cluster.join("n1")
    cluster.kill_rank(0)
    assert cluster.job.state == "running"
    cluster.kill_rank(0)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 1)
    assert "has already started 2 times, which is the limit" in cluster.job.reason


def test_a_rank_that_builds_for_ever_ends_the_job() -> None:
    cluster = Cluster(nnodes=2, standbys=0, start=False, build_timeout_s=5.0)
    cluster.held.add("warm")
    cluster.join("n0")
    cluster.join("n1")
    cluster.pass_time(6)
    assert cluster.job.state == "failed"
    assert "has not come to its first step in 5 s" in cluster.job.reason
