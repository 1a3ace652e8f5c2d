"""Planned migrations: requests and refusals, the way to the flip, and every way to call it off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.daemon_rig import Cluster
from tmd.core.daemon import Refused


def running(nproc: int = 1, *, standbys: int = 2, **settings: Any) -> Cluster:
    """Three nodes and five committed steps."""
    cluster = Cluster(nnodes=3, nproc=nproc, standbys=standbys, **settings)
    cluster.train(5)
    return cluster


def request(cluster: Cluster, **what: Any) -> str:
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", who="root", **what)
    cluster.do(out)
    return migration_id


def state(cluster: Cluster, migration_id: str) -> str:
    return cluster.ledger.migrations[migration_id].state


# ---------------------------------------------------------------- the way that all goes well


def test_a_rank_moves_between_two_steps_and_nobody_else_notices() -> None:
    cluster = running()
    before = cluster.incarnations()
    migration_id = request(cluster, rank=1)
    assert state(cluster, migration_id) == "armed"
    cluster.train(3)
    after = cluster.incarnations()
    assert (after[0], after[2], cluster.member(1).agent.node) == (before[0], before[2], "n3")
    assert (cluster.job.epoch, cluster.job.poison_epoch) == (1, -1)
    assert state(cluster, migration_id) == "done"
    assert cluster.ranks[before[1]].exit_code == 0
    assert [migration.steps_redone for migration in cluster.ledger.migrations.values()] == [0]


def test_the_leaver_is_retired_only_after_the_first_step_without_it() -> None:
    cluster = running()
    leaver = cluster.member(1)
    request(cluster, rank=1)
    cluster.train()
    assert (leaver.alive, leaver.core.phase) == (True, "frozen")
    assert cluster.job.epoch == 0
    cluster.train()
    assert not leaver.alive


def test_the_node_is_given_back_once_nothing_runs_there() -> None:
    cluster = running(nproc=2)
    request(cluster, node="n1")
    cluster.train(2)
    assert cluster.released == ["n1"]
    assert cluster.ledger.nodes["j", "n1"].use == "released"
    assert cluster.agents["n1"].job_over is not None
    assert cluster.agents["n1"].job_over.exit_code == 0


def test_a_node_that_comes_back_before_it_was_given_back_is_used_again() -> None:
    """1. the leaver has frozen and its node stops; 2. the job goes on without it; 3. the node starts anew as a standby node."""
    cluster = running()
    request(cluster, rank=1)
    cluster.train()
    cluster.stop_node("n1")
    cluster.train()
    cluster.join("n1")
    cluster.pass_time(1)
    assert cluster.ledger.nodes["j", "n1"].use == "standby"
    assert cluster.released == []


def test_a_node_with_other_ranks_is_kept() -> None:
    cluster = running(nproc=2)
    request(cluster, rank=2)
    cluster.train(3)
    assert cluster.released == []
    assert cluster.ledger.nodes["j", "n1"].use == "training"


def test_all_ranks_of_a_node_flip_at_once_to_one_standby_node() -> None:
    cluster = running(nproc=2)
    request(cluster, node="n1")
    cluster.train(2)
    assert {cluster.member(rank).agent.node for rank in (2, 3)} == {"n3"}
    assert cluster.job.epoch == 1


def test_the_plan_is_in_the_ledger_with_a_reserved_epoch_before_it_is_sent() -> None:
    cluster = running()
    cluster.held.add("staging")
    request(cluster, rank=1)
    plan = cluster.job.plan
    assert plan is not None
    assert (plan.base_epoch, plan.successor.epoch, cluster.job.epoch_limit) == (0, 1, 1)
    assert plan.sources[1].incarnation == plan.leavers[1]
    assert not cluster.job.armed


def test_nothing_is_armed_before_every_member_has_staged() -> None:
    cluster = running()
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    cluster.train(3)
    assert state(cluster, migration_id) == "installing"
    assert "waiting for the links of" in cluster.daemon.sentences()[migration_id]
    assert not any(cluster.directive(incarnation).armed for incarnation in cluster.incarnations())


def test_the_operator_chooses_the_node() -> None:
    cluster = running()
    request(cluster, rank=1, to_node="n4")
    cluster.train(2)
    assert cluster.member(1).agent.node == "n4"


def test_a_request_waits_for_a_standby_that_is_still_warming() -> None:
    cluster = running(standbys=0)
    cluster.held.add("warm")
    cluster.join("n7")
    migration_id = request(cluster, rank=1)
    assert cluster.daemon.sentences()[migration_id] == "waiting for n7 to warm up (j.4 is building)"
    cluster.held.clear()
    cluster.settle()
    cluster.train(3)
    assert state(cluster, migration_id) == "done"


def test_one_migration_at_a_time_the_second_queues() -> None:
    cluster = running()
    cluster.held.add("staging")
    first = request(cluster, rank=1)
    second = request(cluster, rank=2)
    assert cluster.daemon.sentences()[second] == f"queued behind {first}"
    cluster.held.clear()
    for rank in cluster.ranks.values():
        if rank.alive and rank.core.status().rank is not None:
            rank.carry_out(rank.core.staged(1, 1))
    cluster.settle()
    cluster.train(5)
    assert (state(cluster, first), state(cluster, second)) == ("done", "done")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"rank": 9}, "job j has no rank 9; its ranks are 0 to 2"),
        ({"node": "n9"}, "job j has no node n9; it has n0, n1, n2, n3, n4"),
        ({"node": "n3"}, "no rank of job j lives on n3 (it is standby)"),
        ({}, "name either a node or a rank"),
        ({"rank": 1, "node": "n1"}, "name either a node or a rank"),
        ({"rank": 1, "to_node": "n9"}, "job j has no node n9"),
        ({"rank": 1, "to_node": "n2"}, "n2 has no standby of job j"),
        ({"rank": 1, "to_node": "n1"}, "n1 is where the rank is now"),
    ],
)
def test_a_request_that_cannot_be_granted_is_refused_with_the_reason(what: dict[str, object], told: str) -> None:
    cluster = running()
    with pytest.raises(Refused, match=told.replace("(", r"\(").replace(")", r"\)")):
        request(cluster, **what)
    assert not cluster.ledger.migrations


def test_an_unknown_job_is_refused() -> None:
    cluster = running()
    with pytest.raises(Refused, match="there is no job k; tmctl jobs lists j"):
        cluster.daemon.request_migration(cluster.now, "k", rank=1, who="root")


def test_the_second_request_for_a_rank_is_refused_naming_the_first() -> None:
    cluster = running()
    cluster.held.add("staging")
    first = request(cluster, rank=1)
    with pytest.raises(Refused, match=f"rank 1 is already moving in migration {first}"):
        request(cluster, node="n1")


def test_without_a_standby_a_request_is_refused() -> None:
    cluster = running(standbys=0)
    with pytest.raises(Refused, match=r"1 standby needed, 0 usable"):
        request(cluster, rank=1)


def test_a_finished_job_has_nothing_to_move() -> None:
    cluster = running()
    cluster.finish(0, 1, 2)
    with pytest.raises(Refused, match=r"job j has ended \(done: all 3 ranks finished\)"):
        request(cluster, rank=1)


def test_observe_only_moves_nothing() -> None:
    cluster = running(observe_only=True)
    with pytest.raises(Refused, match="tmd only observes"):
        request(cluster, rank=1)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "disk"))
    assert not cluster.ledger.migrations
    assert any("it would move rank 1" in event.text for event in cluster.ledger.events)


def test_a_dry_run_says_what_would_happen_and_changes_nothing() -> None:
    cluster = running()
    events = len(cluster.ledger.events)
    text = cluster.daemon.explain_migration(cluster.now, "j", rank=1)
    assert text == "rank 1 would move from n1 to n3 (j.4, ready)"
    assert (len(cluster.ledger.events), cluster.ledger.migrations) == (events, {})


def test_paused_requests_queue_and_go_on_when_resumed() -> None:
    cluster = running()
    cluster.do(cluster.daemon.set_paused(cluster.now, True, "root"))
    migration_id = request(cluster, rank=1)
    assert cluster.daemon.sentences()[migration_id] == "queued: tmd is paused"
    cluster.train(2)
    assert cluster.job.epoch == 0
    cluster.do(cluster.daemon.set_paused(cluster.now, False, "root"))
    cluster.train(2)
    assert state(cluster, migration_id) == "done"


# ---------------------------------------------------------------- drains


def test_a_drained_node_is_emptied_and_given_back() -> None:
    cluster = running()
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "fan broken"))
    cluster.train(2)
    assert cluster.member(1).agent.node == "n3"
    assert (cluster.migration().trigger, cluster.migration().state) == ("drain of n1: fan broken", "done")
    assert cluster.released == ["n1"]


def test_a_drain_that_is_taken_back_before_the_flip_ends_its_migration() -> None:
    cluster = running()
    cluster.held.add("staging")
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "fan broken"))
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "up", ""))
    assert (cluster.migration().state, cluster.migration().reason) == ("aborted", "n1 is up again")
    cluster.train(2)
    assert cluster.member(1).agent.node == "n1"


def test_standbys_of_a_drained_node_are_not_used() -> None:
    cluster = running(standbys=1)
    cluster.do(cluster.daemon.node_state(cluster.now, "n3", "draining", ""))
    assert cluster.daemon.sentences()["n3"] == "its standbys are not used: n3 is draining"
    with pytest.raises(Refused, match="0 usable"):
        request(cluster, rank=1)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", ""))
    assert cluster.daemon.sentences()["n1"].startswith("draining: its 1 rank stays until there are as many standbys")


def test_a_drain_waits_for_a_standby_and_then_goes_on() -> None:
    cluster = running(standbys=0)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", ""))
    cluster.train(2)
    cluster.join("n7")
    cluster.train(2)
    assert cluster.member(1).agent.node == "n7"


def test_a_drain_is_tried_again_after_a_failure_but_not_after_an_operators_word() -> None:
    cluster = running()
    cluster.held.add("staging")
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", ""))
    cluster.kill_rank(0)
    assert cluster.migration(0).state == "aborted"
    second = cluster.migration()
    assert (second.kind, second.attempt) == ("planned", 2)
    cluster.do(cluster.daemon.abort_migration(cluster.now, second.migration_id, "root"))
    cluster.train(2)
    assert [m.kind for m in cluster.ledger.migrations.values()] == ["planned", "unplanned", "planned"]
    assert "an operator called its migration off" in cluster.daemon.sentences()["n1"]


# ---------------------------------------------------------------- calling off, and losses on the way


def test_an_operator_calls_a_plan_off_before_it_is_armed_at_once() -> None:
    cluster = running()
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    joiner = cluster.ledger.migrations[migration_id].joiners[1]
    cluster.do(cluster.daemon.abort_migration(cluster.now, migration_id, "root"))
    assert (state(cluster, migration_id), cluster.job.plan) == ("aborted", None)
    assert cluster.ledger.ranks[joiner].state == "standby"
    cluster.train(2)


def test_an_armed_plan_is_off_only_with_a_leavers_word() -> None:
    cluster = running()
    migration_id = request(cluster, rank=1)
    leaver = cluster.member(1)
    leaver.stopped = True
    cluster.do(cluster.daemon.abort_migration(cluster.now, migration_id, "root"))
    assert state(cluster, migration_id) == "armed"
    assert cluster.daemon.sentences()[migration_id] == "being called off: called off by root; waiting for a leaver's word"
    leaver.stopped = False
    cluster.pass_time(1)
    assert state(cluster, migration_id) == "aborted"
    cluster.train(2)
    assert cluster.member(1) is leaver


def test_a_plan_that_flips_while_it_is_called_off_is_carried_through() -> None:
    """1. the vote that carries the flip is under way; 2. the operator calls it off; 3. the vote says yes."""
    cluster = running()
    migration_id = request(cluster, rank=1)
    cluster.agents["n1"].stopped = True  # the leaver hears of it too late
    cluster.do(cluster.daemon.abort_migration(cluster.now, migration_id, "root"))
    assert cluster.vote()
    cluster.agents["n1"].stopped = False
    cluster.settle()
    cluster.train(2)
    assert state(cluster, migration_id) == "done"
    assert cluster.job.epoch == 1


def test_after_the_flip_it_is_too_late_to_call_off() -> None:
    cluster = running()
    cluster.held.add("state")
    migration_id = request(cluster, rank=1)
    cluster.train()
    with pytest.raises(Refused, match="it is too late to call it off"):
        cluster.daemon.abort_migration(cluster.now, migration_id, "root")


def test_a_joiner_lost_before_the_flip_is_replaced_by_another_standby() -> None:
    cluster = running()
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    first = cluster.ledger.migrations[migration_id].joiners[1]
    cluster.ranks[first].die()
    cluster.held.clear()
    cluster.settle()
    cluster.train(2)
    migration = cluster.ledger.migrations[migration_id]
    assert (migration.state, migration.attempt, migration.joiners[1] != first) == ("done", 2, True)
    assert cluster.job.poison_epoch == -1


def test_nobody_flips_to_a_joiner_whose_node_has_died_just_after_staging() -> None:
    """
    1. The joiner has staged its links; one stayer has not.
    2. The joiner's node loses power: its agent's connection closes, and nothing else is known yet.
    3. The stayer stages too: every link is said to be staged.
    """
    cluster = running()
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    plan = cluster.job.plan
    assert plan is not None
    first = cluster.ranks[cluster.ledger.migrations[migration_id].joiners[1]]
    first.carry_out(first.core.staged(plan.plan_id, 1))
    cluster.settle()
    cluster.kill_node(first.agent.node)
    cluster.held.clear()
    for rank in (0, 1, 2):
        cluster.member(rank).carry_out(cluster.member(rank).core.staged(plan.plan_id, 1))
    cluster.settle()
    assert not cluster.job.armed
    assert cluster.daemon.sentences()[migration_id] == f"waiting for the agent of {first.agent.node} to come back"
    cluster.train(2)
    cluster.pass_time(2.5)
    cluster.train(2)
    migration = cluster.ledger.migrations[migration_id]
    assert (migration.state, migration.attempt) == ("done", 2)
    assert cluster.job.poison_epoch == -1


def test_a_recovery_waits_for_a_joiner_whose_node_has_died_only_for_the_grace() -> None:
    """The flip had happened; the leaver goes on."""
    cluster = running(standbys=1, report_timeout_s=60.0)
    cluster.held.add("state")
    migration_id = request(cluster, rank=1)
    cluster.train()
    assert state(cluster, migration_id) == "copying"
    leaver = cluster.ledger.migrations[migration_id].leavers[1]
    cluster.kill_node(cluster.ranks[cluster.ledger.migrations[migration_id].joiners[1]].agent.node)
    cluster.pass_time(cluster.settings.agent_grace_s + 1.0)
    cluster.train(2)
    assert state(cluster, migration_id) == "aborted"
    assert cluster.incarnations()[1] == leaver


def test_a_joiner_lost_with_no_other_standby_leaves_the_job_as_it_was() -> None:
    cluster = running(standbys=1, plan_timeout_s=5.0)
    cluster.held.add("staging")
    before = cluster.incarnations()
    migration_id = request(cluster, rank=1)
    cluster.kill_node("n3")
    cluster.pass_time(2.5)
    cluster.train(2)
    assert (cluster.incarnations(), cluster.job.plan) == (before, None)
    assert cluster.daemon.sentences()[migration_id] == "waiting for a standby"
    cluster.pass_time(6)
    assert cluster.ledger.migrations[migration_id].reason == "no standby became ready in 5 s"


def test_a_plan_that_does_not_flip_in_time_is_called_off() -> None:
    cluster = running(plan_timeout_s=3.0)
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    for _ in range(4):
        cluster.train(2)
        cluster.pass_time(1)
    assert state(cluster, migration_id) == "aborted"
    assert "it has not flipped for 3 s: waiting for the links of" in cluster.ledger.migrations[migration_id].reason


def test_a_leaver_lost_before_the_flip_is_replaced_by_the_prepared_joiner() -> None:
    cluster = running()
    cluster.held.add("staging")
    migration_id = request(cluster, rank=1)
    joiner = cluster.ledger.migrations[migration_id].joiners[1]
    cluster.kill_rank(1)
    assert cluster.incarnations()[1] == joiner
    assert state(cluster, migration_id) == "aborted"
    assert cluster.migration().kind == "unplanned"
    cluster.train(2)
    assert cluster.migration().state == "done"


def test_another_rank_lost_before_the_flip_cancels_the_plan() -> None:
    cluster = running()
    cluster.held.add("staging")
    leaver = cluster.incarnations()[1]
    migration_id = request(cluster, rank=1)
    cluster.kill_rank(2)
    assert state(cluster, migration_id) == "aborted"
    assert cluster.incarnations()[1] == leaver
    assert cluster.job.epoch == 2  # epoch 1 was reserved by the plan
    cluster.train(2)


def test_a_joiner_lost_after_the_flip_brings_the_leaver_back() -> None:
    cluster = running()
    cluster.held.add("state")
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    cluster.train()
    assert leaver.core.phase == "frozen"
    cluster.ranks[cluster.ledger.migrations[migration_id].joiners[1]].die()
    cluster.settle()
    assert cluster.member(1) is leaver
    assert (state(cluster, migration_id), cluster.job.epoch) == ("aborted", 2)
    cluster.held.clear()
    cluster.train(2)


def test_a_joiner_lost_after_the_flip_is_named_whoever_saw_it_first() -> None:
    """A peer notices the end of its link, and knows only the rank, before the agent says who has died."""
    cluster = running()
    cluster.held.add("state")
    migration_id = request(cluster, rank=1)
    cluster.train()
    joiner, peer = cluster.ranks[cluster.ledger.migrations[migration_id].joiners[1]], cluster.member(0)
    joiner.stopped = True
    peer.carry_out(peer.core.link_broken(peer.core.live_epoch, 1, orderly=False, reason="rank 1 hung up"))
    cluster.settle()
    assert cluster.job.state == "recovering"
    joiner.die()
    cluster.settle()
    reason = cluster.ledger.migrations[migration_id].reason
    assert reason.startswith("an unplanned failure came first: rank 0 on ")
    assert f"rank 1 hung up; the joiner {joiner.core.incarnation} on " in reason
    assert reason.endswith("was lost: killed by SIGKILL")


@pytest.mark.parametrize("held", ["staging", "state"])
def test_a_joiner_that_freezes_is_not_waited_for(held: str) -> None:
    """Its agent speaks on. Before the flip another standby is tried; after it the leaver goes on at once."""
    cluster = running(heartbeat_timeout_s=3.0, report_timeout_s=60.0)
    cluster.held.add(held)
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    if held == "state":
        cluster.train()
        assert leaver.core.phase == "frozen"
    first = cluster.ledger.migrations[migration_id].joiners[1]
    cluster.ranks[first].stopped = True
    cluster.held.clear()
    cluster.pass_time(4)
    assert cluster.ledger.ranks[first].state == "lost"
    assert cluster.ledger.ranks[first].reason.startswith("it has said nothing for 3.")
    cluster.train(2)
    migration = cluster.ledger.migrations[migration_id]
    assert (migration.state, cluster.member(1) is leaver) == (("done", False) if held == "staging" else ("aborted", True))


def test_a_leaver_lost_after_the_joiner_has_its_state_does_not_matter() -> None:
    cluster = running()
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    cluster.train()
    joiner = cluster.ledger.migrations[migration_id].joiners[1]
    leaver.die()
    cluster.settle()
    cluster.train(2)
    assert cluster.incarnations()[1] == joiner
    assert state(cluster, migration_id) == "done"


def test_a_leaver_lost_while_it_hands_over_is_replaced_from_a_survivor() -> None:
    cluster = running()
    cluster.held.add("state")
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    cluster.train()
    leaver.die()
    cluster.settle()
    cluster.held.clear()
    cluster.settle()
    cluster.train(2)
    assert cluster.incarnations()[1] == cluster.ledger.migrations[migration_id].joiners[1]
    assert (state(cluster, migration_id), cluster.migration().kind, cluster.migration().state) == ("aborted", "unplanned", "done")


def test_a_stayer_lost_after_the_flip_lets_the_leaver_go_on() -> None:
    cluster = running()
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    cluster.train()
    cluster.kill_rank(2)
    assert cluster.member(1) is leaver
    joiner = cluster.ledger.migrations[migration_id].joiners[1]
    assert not cluster.ranks[joiner].alive, "it has held the state of a role that it did not get"
    cluster.train(2)


def test_a_retired_process_that_does_not_leave_is_killed() -> None:
    cluster = running()
    leaver = cluster.member(1)
    request(cluster, rank=1)
    cluster.train()
    leaver.stopped = True
    cluster.train()
    assert leaver.alive
    cluster.pass_time(6)
    assert leaver.exit_code == -9
    assert cluster.released == ["n1"]


def test_a_leaver_lost_after_the_flip_before_the_daemon_knows_of_the_first_step_does_not_matter() -> None:
    """1. flip; 2. the joiner has the state and step 6 is committed; 3. the daemon hears of the leaver's death before that."""
    cluster = running()
    leaver = cluster.member(1)
    migration_id = request(cluster, rank=1)
    cluster.train()
    for node in ("n0", "n2", "n3"):
        cluster.agents[node].stopped = True
    assert cluster.vote()
    leaver.die()
    cluster.settle()
    assert cluster.job.state == "running"
    for node in ("n0", "n2", "n3"):
        cluster.agents[node].stopped = False
    cluster.settle()
    assert state(cluster, migration_id) == "done"
    assert cluster.job.poison_epoch == -1
