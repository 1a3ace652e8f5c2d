"""Unplanned losses: from the first sign to the word to go on, and further losses at every point between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.daemon_rig import Cluster
from tmd.core.instructions import DirectAgent, Instruction, Persist
from tmd.protocol.membership import buddy_of
from tmd.protocol.rank import Directive


def running(**settings: Any) -> Cluster:
    """Three nodes of one rank, two standbys, five committed steps."""
    cluster = Cluster(nnodes=3, standbys=2, **settings)
    cluster.train(5)
    return cluster


def orders(batch: list[Instruction]) -> list[Directive]:
    return [order for part in batch if isinstance(part, DirectAgent) for order in part.directive.ranks]


def test_a_killed_rank_is_replaced_and_the_others_keep_their_processes() -> None:
    cluster = running()
    before = cluster.incarnations()
    cluster.kill_rank(1)
    after = cluster.incarnations()
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]
    assert (cluster.job.state, cluster.job.epoch) == ("running", 1)
    cluster.train(3)
    migration = cluster.migration()
    assert (migration.kind, migration.state, migration.leavers, migration.joiners) == (
        "unplanned",
        "done",
        {1: before[1]},
        {1: after[1]},
    )
    assert migration.trigger == "rank 1 on n1 is lost: killed by SIGKILL"


def test_the_joiner_takes_state_from_a_survivor_and_its_small_state_from_its_buddy() -> None:
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    install = cluster.directive(cluster.incarnations()[1]).install
    assert install.joining.keys() == {1}
    assert install.joining[1].replica_rank in (0, 2)
    assert install.joining[1].record_rank == buddy_of(1, 3, 1)
    assert install.target_step == 5


def test_nobody_is_told_to_go_before_the_joiner_has_its_state() -> None:
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    assert cluster.job.epoch == 0
    assert not cluster.vote()
    assert cluster.sentence() == "installing epoch 1: waiting for rank 1"
    cluster.held.clear()
    cluster.settle()
    cluster.train()


def test_a_yes_that_one_survivor_knows_counts_for_all() -> None:
    """1. the vote on step 5 says yes; 2. rank 0 alone learns it; 3. rank 1 dies; 4. everybody goes on from step 6."""
    cluster = running()
    assert cluster.vote(unknown=(1, 2))
    cluster.kill_rank(1)
    assert cluster.job.resolution is not None
    assert cluster.job.resolution.target_step == 6
    assert {cluster.member(rank).core.next_step for rank in range(3)} == {6}


def test_a_yes_that_only_the_lost_rank_knew_does_not_count() -> None:
    """1. the vote on step 5 says yes; 2. rank 1 alone learns it, and dies before it says so; 3. the others redo step 5."""
    cluster = running()
    cluster.agents["n1"].stopped = True
    assert cluster.vote(unknown=(0, 2))
    cluster.kill_node("n1")
    cluster.pass_time(3)
    assert cluster.job.resolution is not None
    assert cluster.job.resolution.target_step == 5
    cluster.train(2)
    assert cluster.member(0).core.next_step == 7


def test_the_resolution_is_in_the_ledger_before_any_rank_hears_of_it() -> None:
    cluster = running()
    cluster.kill_rank(1)
    resolving = [batch for batch in cluster.batches if any(order.resolution is not None for order in orders(batch))]
    assert resolving
    for batch in cluster.batches:
        assert all(isinstance(part, Persist) == (place == 0) for place, part in enumerate(batch) if isinstance(part, Persist))
    (first,) = [part for part in resolving[0] if isinstance(part, Persist)]
    assert first.jobs[0].resolution is not None


def test_a_link_flap_costs_no_standby() -> None:
    cluster = running()
    before = cluster.incarnations()
    process = cluster.member(1)
    process.carry_out(process.core.link_broken(0, 2, orderly=False, reason="connection reset"))
    cluster.settle()
    assert cluster.incarnations() == before
    assert (cluster.job.state, cluster.job.epoch) == ("running", 1)
    assert not cluster.ledger.migrations
    cluster.train(2)


def test_two_ranks_lost_at_once_are_one_migration() -> None:
    cluster = running()
    cluster.agents["n0"].stopped = True  # its report is awaited, so both losses fall into one recovery
    cluster.kill_rank(1)
    cluster.kill_rank(2)
    cluster.agents["n0"].stopped = False
    cluster.settle()
    assert len(cluster.ledger.migrations) == 1
    assert set(cluster.migration().leavers) == {1, 2}
    cluster.train(2)


def test_a_second_rank_lost_while_the_epoch_is_installed_keeps_the_step_and_raises_the_epoch() -> None:
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    target, epoch = cluster.job.resolution, cluster.job.epoch_limit
    cluster.kill_rank(2)
    cluster.held.clear()
    cluster.settle()
    assert cluster.job.resolution == target
    assert cluster.job.epoch == epoch + 1
    assert set(cluster.migration().joiners) == {1, 2}
    cluster.train(2)


def test_a_joiner_lost_before_the_word_to_go_is_replaced_by_the_next_standby() -> None:
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    first = cluster.incarnations()[1]
    cluster.kill_rank(1)
    cluster.held.clear()
    cluster.settle()
    assert cluster.incarnations()[1] != first
    assert (cluster.migration().attempt, cluster.migration().leavers) == (2, {1: "j.2"})
    cluster.train(2)


def test_a_rank_lost_between_the_word_to_go_and_its_receipt() -> None:
    """1. epoch 1 is live in the ledger; 2. rank 2 dies before it hears so; 3. the step is resolved again, for epoch 1."""
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    cluster.member(2).stopped = True
    cluster.held.clear()
    cluster.settle()
    assert cluster.job.epoch == 1
    cluster.member(2).stopped = False
    cluster.kill_rank(2)
    assert (cluster.job.state, cluster.job.epoch) == ("running", 2)
    assert cluster.job.resolution is not None
    assert cluster.job.resolution.epoch == 1
    cluster.train(2)


def test_a_poisoned_rank_that_does_not_report_is_lost() -> None:
    cluster = running(report_timeout_s=2.0)
    cluster.member(2).stopped = True
    cluster.kill_rank(1)
    assert cluster.sentence() == "waiting for the report of rank 2 on n2"
    cluster.pass_time(3)
    assert set(cluster.migration().leavers) == {1, 2}
    assert cluster.job.state == "running"


def test_a_frozen_rank_is_killed_by_its_agent_once_it_is_replaced() -> None:
    cluster = running(report_timeout_s=2.0, heartbeat_timeout_s=2.0)
    frozen = cluster.member(2)
    frozen.stopped = True
    cluster.pass_time(8)
    assert cluster.incarnations()[2] != frozen.core.incarnation
    assert not frozen.alive
    cluster.train(2)


def test_without_a_standby_the_survivors_wait_and_say_what_for() -> None:
    cluster = Cluster(nnodes=3, standbys=0, hold_limit_s=5.0)
    cluster.train(3)
    cluster.kill_node("n1")
    assert cluster.sentence() == "rank 1 has no holder: waiting for a standby; start tmd-run on another node or bring one back"
    cluster.pass_time(6)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 75)
    assert "no standby came in 5 s" in cluster.job.reason


def test_a_node_that_comes_while_the_survivors_wait_is_taken() -> None:
    cluster = Cluster(nnodes=3, standbys=0)
    cluster.train(3)
    cluster.kill_node("n1")
    cluster.held.add("warm")
    cluster.join("n5")
    assert cluster.sentence() == "rank 1 has no holder: waiting for n5 to warm up (j.4 is building)"
    cluster.held.clear()
    cluster.settle()
    cluster.train(2)


def test_without_a_standby_a_healthy_node_starts_one_in_the_free_slot() -> None:
    cluster = Cluster(nnodes=3, standbys=0)
    cluster.train(3)
    cluster.kill_rank(1)
    assert cluster.member(1).agent.node == "n1"
    cluster.train(2)


def test_the_free_slot_of_a_draining_node_is_not_used() -> None:
    cluster = Cluster(nnodes=3, standbys=0)
    cluster.train(3)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "disk"))
    cluster.kill_rank(1)
    assert cluster.sentence().startswith("rank 1 has no holder: waiting for a standby")


def test_a_role_keeps_away_from_the_nodes_of_its_buddy_and_ward() -> None:
    """n3 and n4 are standby nodes; once rank 0 lives on n3, its buddy's role goes to n4 although n3 has room."""
    cluster = Cluster(nnodes=3, nproc=2, standbys=2)
    cluster.train(3)
    cluster.kill_rank(0)
    first = cluster.member(0).agent.node
    cluster.kill_rank(2)
    assert buddy_of(0, 6, 2) == 2
    assert cluster.member(2).agent.node not in (first, "n1")


def test_a_whole_node_moves_to_one_whole_node() -> None:
    cluster = Cluster(nnodes=3, nproc=2, standbys=2)
    cluster.train(3)
    cluster.kill_node("n1")
    assert {cluster.member(rank).agent.node for rank in (2, 3)} in ({"n3"}, {"n4"})
    cluster.train(2)


def test_small_state_lost_after_a_committed_step_is_said_in_the_ledger() -> None:
    cluster = running()
    for node in ("n3", "n4"):
        cluster.standby_on(node).origin = "approximate"
    cluster.kill_rank(1)
    assert cluster.job.state == "running"
    (line,) = cluster.job.approximations
    assert line.startswith("step 5: RNG, data position and buffers of rank 1 on n3 are approximate")


def test_small_state_that_came_inexactly_in_an_attempt_that_failed_is_said_as_well() -> None:
    """1. the joiner loads for epoch 1; 2. a survivor's links fail; 3. in epoch 2 the joiner joins nothing: it has its state."""
    cluster = running()
    for node in ("n3", "n4"):
        cluster.standby_on(node).origin = "approximate"
    cluster.held.add("links")
    cluster.kill_rank(1)
    assert cluster.member(1).core.has_state
    survivor = cluster.member(2)
    cluster.held.clear()
    survivor.carry_out(survivor.core.links_failed(cluster.job.epoch_limit, "rank 0 does not answer"))
    cluster.settle()
    assert (cluster.job.state, cluster.job.epoch) == ("running", 2)
    assert len(cluster.job.approximations) == 1


def test_small_state_lost_before_the_first_committed_step_starts_the_job_from_nothing() -> None:
    cluster = Cluster(nnodes=3, standbys=1)
    cluster.standby_on("n3").origin = "missing"
    cluster.kill_rank(1)
    assert (cluster.job.state, cluster.job.restarts, cluster.job.approximations) == ("running", 1, ())
    cluster.train(2)


def test_when_nobody_with_the_state_is_left_the_job_is_given_up() -> None:
    cluster = Cluster(nnodes=2, standbys=2)
    cluster.train(3)
    cluster.agents["n0"].stopped = True
    cluster.kill_rank(1)
    cluster.agents["n0"].stopped = False
    cluster.kill_rank(0)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 75)
    assert "no rank with the state is left (last heard of: step 3)" in cluster.job.reason


def test_an_install_that_does_not_come_to_an_end_is_tried_again_under_the_next_epoch() -> None:
    cluster = running(install_timeout_s=2.0)
    process = cluster.member(1)
    cluster.held.add("links")
    process.carry_out(process.core.link_broken(0, 2, orderly=False, reason="connection reset"))
    cluster.settle()
    first = cluster.job.epoch_limit
    cluster.held.clear()
    cluster.pass_time(3)
    assert (cluster.job.state, cluster.job.epoch) == ("running", first + 1)


def test_a_joiner_that_never_gets_its_state_is_replaced() -> None:
    cluster = running(install_timeout_s=2.0)
    cluster.held.add("state")
    cluster.kill_rank(1)
    first = cluster.incarnations()[1]
    cluster.pass_time(2.5)
    cluster.held.clear()
    cluster.pass_time(1)
    assert cluster.incarnations()[1] != first
    cluster.train(2)


def lose_rank_1_in_a_long_step(cluster: Cluster, *stuck: int) -> None:
    """The survivors named are in the middle of a step that goes on for as long as the test likes."""
    for rank in stuck:
        cluster.member(rank).stuck = True
    cluster.kill_rank(1)


def test_a_survivor_that_is_still_in_its_step_is_waited_for() -> None:
    """Its step takes ten times as long as an installation may; the joiner then still has the whole time to load."""
    cluster = running(install_timeout_s=2.0)
    cluster.held.add("state")
    lose_rank_1_in_a_long_step(cluster, 0, 2)
    joiner = cluster.incarnations()[1]
    cluster.pass_time(20.0)
    assert cluster.sentence() == "installing epoch 1: ranks 0, 2 still in a step"
    for rank in (0, 2):
        cluster.member(rank).stuck = False
    cluster.settle()
    cluster.pass_time(1.5)
    assert cluster.sentence() == "installing epoch 1: waiting for rank 1"
    cluster.held.clear()
    cluster.settle()
    assert (cluster.job.epoch, cluster.incarnations()[1]) == (1, joiner)
    cluster.train(2)


def test_a_survivor_that_freezes_in_its_step_is_not_waited_for() -> None:
    cluster = running(install_timeout_s=2.0)
    cluster.held.add("links")
    lose_rank_1_in_a_long_step(cluster, 0, 2)
    for rank in (0, 2):
        cluster.member(rank).stopped = True
    cluster.pass_time(8.0)
    assert cluster.job.epoch_limit > 1


def test_a_survivor_whose_step_does_not_end_is_replaced_after_the_hold_limit() -> None:
    cluster = running(hold_limit_s=20.0)
    cluster.held.add("links")
    lose_rank_1_in_a_long_step(cluster, 0)
    hung = cluster.member(0)
    cluster.pass_time(19.0)
    assert cluster.member(0) is hung
    cluster.held.clear()
    cluster.pass_time(2.0)
    assert (cluster.member(0) is hung, hung.alive) == (False, False)
    cluster.train(2)


def test_observe_only_says_what_it_would_have_done_and_uses_no_standby() -> None:
    cluster = running(observe_only=True)
    cluster.kill_rank(1)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 1)
    assert cluster.job.reason.endswith("tmd only observes, it would have used j.4 on n3")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_may_be_lost_the_first_one_too(rank: int) -> None:
    cluster = running()
    cluster.kill_rank(rank)
    cluster.train(2)
    cluster.kill_rank(rank)
    cluster.train(2)
    assert cluster.job.epoch == 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_without_any_standby_a_new_one_warms_up_whichever_rank_was_lost(lost: int) -> None:
    """Also the last rank, whose answers of the build every standby takes while it lives."""
    cluster = Cluster(nnodes=3, standbys=0)
    cluster.train(3)
    cluster.kill_node(f"n{lost}")
    cluster.join("n7")
    cluster.train(2)
    assert list(cluster.migration().leavers) == [lost]


def test_standbys_warm_up_while_an_epoch_without_the_last_rank_cannot_be_installed() -> None:
    """
    1. The last rank is lost: the only standby takes its role, and is not linked yet.
    2. Another rank is lost: a standby is needed, and the only holder of the last role does not run.
    """
    cluster = Cluster(nnodes=4, standbys=1)
    cluster.train(3)
    cluster.held.add("links")
    cluster.kill_node("n3")
    cluster.held.clear()
    cluster.kill_rank(1)
    cluster.train(2)
    assert sorted(cluster.migration().leavers) == [1, 3]
