"""Who counts as lost: exits, silence, closed connections, the resource manager's word; and who does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.daemon_rig import Cluster
from tmd.protocol.exits import EXIT_BROKEN, EXIT_HELD, EXIT_THREAD, EXIT_TORN


def running(nnodes: int = 3, *, standbys: int = 2, **settings: Any) -> Cluster:
    cluster = Cluster(nnodes=nnodes, standbys=standbys, **settings)
    cluster.train(5)
    return cluster


def test_a_bug_in_the_script_ends_the_job_with_its_traceback_and_uses_no_standby() -> None:
    cluster = running()
    process = cluster.member(1)
    process.carry_out(process.core.failed("Traceback …\nValueError: bad batch"))
    process.die(1)
    cluster.links_closed(process, 0, orderly=False)
    cluster.settle()
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 1)
    assert cluster.job.reason.endswith("ValueError: bad batch")
    assert all(agent.job_over is not None and agent.job_over.exit_code == 1 for agent in cluster.agents.values())
    assert not cluster.ledger.migrations


def test_a_positive_exit_code_ends_the_job_naming_it() -> None:
    cluster = running()
    cluster.pass_time(0.5)
    cluster.kill_rank(1, exit_code=3)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 3)
    assert cluster.job.reason == "rank 1 on n1 exited with code 3 at step 5: see its log"


def test_a_rank_that_held_too_long_ends_the_job_for_all_do() -> None:
    cluster = running()
    cluster.kill_rank(1, exit_code=EXIT_HELD)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", EXIT_HELD)


def test_an_exit_code_that_comes_after_the_first_sign_of_dying_still_ends_the_job() -> None:
    """1. the agent sees that the process is dying; 2. a standby is chosen; 3. the exit code says that the script did it."""
    cluster = running()
    cluster.held.add("state")
    process = cluster.member(1)
    process.state = "exiting"
    cluster.settle()
    assert cluster.job.state == "recovering"
    process.die(3)
    cluster.settle()
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 3)


def test_the_first_sign_of_dying_is_enough_to_recover() -> None:
    cluster = running()
    process = cluster.member(1)
    process.state = "exiting"
    cluster.settle()
    assert cluster.incarnations()[1] != process.core.incarnation
    assert cluster.migration().trigger == "rank 1 on n1 is lost: its process is dying"


def test_a_rank_that_ends_because_its_attempt_was_called_off_is_replaced() -> None:
    cluster = running()
    process = cluster.member(1)
    cluster.agents["n0"].stopped = True
    process.carry_out(process.core.link_broken(0, 0, orderly=False, reason="reset"))
    process.die(1)
    cluster.agents["n0"].stopped = False
    cluster.settle()
    assert cluster.job.state == "running"
    assert cluster.incarnations()[1] != process.core.incarnation


@pytest.mark.parametrize("code", [EXIT_BROKEN, EXIT_THREAD, EXIT_TORN])
def test_a_rank_that_ends_itself_as_one_that_cannot_be_trusted_is_replaced(code: int) -> None:
    cluster = running()
    process = cluster.member(1)
    process.die(code)
    cluster.settle()
    assert cluster.job.state == "running"
    assert cluster.incarnations()[1] != process.core.incarnation


def test_a_standby_that_is_killed_is_started_again_and_one_that_fails_is_not() -> None:
    cluster = running(standbys=1)
    first = cluster.standby_on("n3")
    first.die()
    cluster.settle()
    second = cluster.standby_on("n3")
    assert second is not first
    second.carry_out(second.core.failed("Traceback …\nImportError: no module named data"))
    second.die(1)
    cluster.settle()
    assert cluster.daemon.standbys() == []
    assert cluster.ledger.ranks[second.core.incarnation].reason == "ImportError: no module named data"
    cluster.train()


def test_a_closed_connection_alone_harms_nothing_while_steps_are_committed() -> None:
    """A rank whose votes commit is alive, whatever its agent says."""
    cluster = running()
    cluster.disconnect("n1")
    for _ in range(100):
        cluster.train()
        cluster.pass_time(0.5)
    assert (cluster.job.state, cluster.job.epoch) == ("running", 0)
    cluster.say_hello(cluster.agents["n1"])
    assert not cluster.agents["n1"].refused


def test_a_closed_connection_of_a_job_that_stands_still_is_a_loss_after_a_grace() -> None:
    cluster = running()
    cluster.agents["n1"].stopped = True
    cluster.disconnect("n1")
    cluster.pass_time(1.5)
    assert cluster.job.epoch == 0
    cluster.pass_time(1.5)
    assert cluster.migration().trigger == "rank 1 on n1 is lost: the connection of its agent closed"


def test_a_closed_connection_and_broken_links_are_a_loss_at_once() -> None:
    cluster = running()
    now = cluster.now
    cluster.kill_node("n1")
    assert cluster.now == now
    assert cluster.job.epoch == 1
    assert cluster.migration().trigger.endswith("closed and its peers lost their links to it")


def test_a_frozen_node_is_lost_after_the_heartbeat_timeout() -> None:
    cluster = running(heartbeat_timeout_s=3.0)
    cluster.stop_node("n1")
    cluster.pass_time(2.5)
    assert cluster.job.epoch == 0
    cluster.pass_time(1.5)
    assert cluster.migration().trigger == "rank 1 on n1 is lost: its agent has been silent for 3 s"
    cluster.stop_node("n1", stopped=False)
    cluster.pass_time(1)
    assert "was given up" in cluster.agents["n1"].refused
    assert not any(rank.alive for rank in cluster.agents["n1"].ranks())
    cluster.train(2)


def test_a_frozen_node_ends_no_job_that_is_only_observed() -> None:
    """Without tmd it would have gone on when the node thaws."""
    cluster = running(heartbeat_timeout_s=3.0, observe_only=True)
    cluster.stop_node("n1")
    cluster.pass_time(30.0)
    assert (cluster.job.state, cluster.job.epoch) == ("running", 0)
    told = [event.text for event in cluster.ledger.events if event.subject == "n1" and event.kind == "notice"]
    assert told == ["n1 would be given up: its agent has been silent for 3 s; tmd only observes"]
    cluster.stop_node("n1", stopped=False)
    cluster.train(3)
    assert cluster.job.state == "running"


def test_long_steps_are_given_time_before_silence_counts() -> None:
    cluster = Cluster(nnodes=3, standbys=1, heartbeat_timeout_s=3.0)
    for _ in range(6):
        cluster.pass_time(10)
        cluster.train()
    cluster.stop_node("n1")
    cluster.pass_time(15)
    assert cluster.job.epoch == 0
    cluster.pass_time(10)
    assert cluster.job.epoch == 1


def test_when_most_agents_fall_silent_at_once_the_daemon_suspects_itself() -> None:
    cluster = running(standbys=0, heartbeat_timeout_s=3.0)
    for node in ("n0", "n1"):
        cluster.stop_node(node)
    cluster.pass_time(5)
    assert cluster.job.state == "running"
    assert any("the fault may be the daemon's" in event.text for event in cluster.ledger.events)
    for node in ("n0", "n1"):
        cluster.stop_node(node, stopped=False)
    cluster.pass_time(1)
    cluster.train(2)
    assert cluster.job.epoch == 0


def test_when_no_agent_at_all_is_heard_nobody_is_given_up_before_survivors_would_give_up_themselves() -> None:
    """The network of the head node is down, and a rank dies meanwhile."""
    cluster = running(hold_limit_s=60.0, report_timeout_s=2.0)
    for node in list(cluster.agents):
        cluster.stop_node(node)
    cluster.pass_time(30)
    assert cluster.job.state == "running"
    for node in list(cluster.agents):
        cluster.agents[node].stopped = False
        for rank in cluster.agents[node].ranks():
            rank.stopped = False
    cluster.kill_rank(1)
    cluster.pass_time(1)
    assert cluster.job.epoch == 1
    cluster.train(2)


def test_a_node_that_the_resource_manager_calls_down_is_lost_when_its_agent_is_silent() -> None:
    cluster = running()
    cluster.stop_node("n1")
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "down", "not responding"))
    cluster.pass_time(1.0)
    assert cluster.ledger.nodes["j", "n1"].use == "lost"
    assert cluster.migration().trigger == "rank 1 on n1 is lost: the resource manager says that n1 is down"


def test_a_node_that_is_called_down_while_its_agent_speaks_goes_on() -> None:
    """The resource manager may say so late, of a life of the node that is over."""
    cluster = running()
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "down", "not responding"))
    cluster.pass_time(3.0)
    cluster.train()
    assert cluster.job.epoch == 0


def test_a_single_frozen_rank_is_noticed_although_its_agent_speaks() -> None:
    cluster = running(heartbeat_timeout_s=3.0, report_timeout_s=2.0)
    cluster.member(1).stopped = True
    cluster.pass_time(3.5)
    assert "says nothing and no step is committed" in next(e.text for e in cluster.ledger.events if e.kind == "poison")
    cluster.pass_time(3)
    assert cluster.migration().trigger == "rank 1 on n1 is lost: it did not report for 2 s"


def test_a_process_that_its_agent_forgot_is_lost() -> None:
    cluster = running()
    process = cluster.ranks.pop(cluster.incarnations()[1])
    cluster.settle()
    assert cluster.incarnations()[1] != process.core.incarnation
