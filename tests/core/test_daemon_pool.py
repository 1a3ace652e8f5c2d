"""Nodes from a pool that jobs share: when one is taken and by which order, what people are told while none comes, and that what
was taken is given back. The agents' commands are a test's own words here; tests/slurm runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.daemon_rig import Agent, Cluster
from tmd.protocol.agent import NodeOrder


def ordered(cluster: Cluster, kind: str) -> tuple[Agent, NodeOrder]:
    found = cluster.order(kind)
    assert found is not None, f"no {kind} is ordered: {cluster.daemon.sentences()}"
    return found


def job(*, standby: int = 1, pooled: bool = True, user: str = "alice", **pool: Any) -> Cluster:
    """Three ranks on n0 to n2 and no standby, in a job that asked for some; a pool of n7 and n8."""
    cluster = Cluster(allocated=True, standbys=0)
    cluster.allocate(standby=standby, pooled=pooled, user=user)
    cluster.pool(**pool)
    cluster.train(3)
    return cluster


def drain(cluster: Cluster, node: str) -> None:
    cluster.do(cluster.daemon.node_state(cluster.now, node, "draining", "bad DIMM"))


def expanded(cluster: Cluster, node: str, **changes: Any) -> None:
    """The growth that is outstanding succeeds, and an agent comes up there."""
    agent, order = ordered(cluster, "expand")
    assert (order.nodes, order.reservation) == ((node,), "standby")
    agent.say(order, "running")
    cluster.allocate(*cluster.allocation, node, **changes)
    agent.say(order, "done")
    starter, launch = ordered(cluster, "launch")
    assert launch.nodes == (node,)
    starter.say(launch, "running")
    cluster.join(node, launched=True)


def given_back(cluster: Cluster, node: str, **changes: Any) -> None:
    """The order to make the job smaller by this node succeeds."""
    if cluster.agents[node].connected:
        assert cluster.agents[node].job_over is not None, f"the agent of {node} was not sent away"
        cluster.disconnect(node)
    cluster.pass_time(0.5)
    agent, order = ordered(cluster, "release")
    assert order.nodes == (node,)
    cluster.allocate(*(each for each in cluster.allocation if each != node), **changes)
    agent.say(order, "done")


ASKED: dict[str, Any] = {"standby": 1, "pooled": True, "user": "alice"}
OWN: dict[str, Any] = {"standby": 1, "pooled": False, "user": "alice"}


def test_a_job_that_counts_on_the_pool_takes_nothing_until_it_needs_it() -> None:
    cluster = job()
    cluster.pass_time(20)
    assert cluster.order("expand") is None


@pytest.mark.parametrize("way", ["expand", "companion"])
def test_a_drained_node_s_ranks_move_to_a_node_of_the_pool(way: str) -> None:
    cluster = job(way=way)
    drain(cluster, "n1")
    assert (
        f"n7 is being taken from reservation standby by {'expansion' if way == 'expand' else 'a companion job'}"
        in (cluster.daemon.sentences()["n1"])
    )
    agent, order = ordered(cluster, way)
    assert agent.node == "n0", "the batch host stays"
    if way == "expand":
        expanded(cluster, "n7", **ASKED)
    else:
        agent.say(order, "done")
        cluster.allocate(*cluster.allocation, "n7", companions={"n7": "12"}, **ASKED)
        assert cluster.order("launch") is None, "a companion job starts its own agent"
        cluster.join("n7", launched=True, launches=False, grows=False)
    cluster.train(3)
    assert cluster.migration().state == "done"
    assert cluster.member(1).agent.node == "n7"
    origin = cluster.ledger.nodes[cluster.job_id, "n7"].origin
    assert origin == f"reservation standby, by {'expansion' if way == 'expand' else 'companion job 12'}"
    assert cluster.daemon.sentences()["n7"] == f"trains rank 1; from {origin}"
    assert cluster.order(way) is None


def test_a_lost_node_is_replaced_from_the_pool() -> None:
    cluster = job()
    cluster.kill_node("n2")
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 1)
    assert "n7 is being taken from reservation standby" in cluster.sentence()
    expanded(cluster, "n7", **ASKED)
    cluster.train(2)
    assert cluster.member(2).agent.node == "n7"


def test_a_standby_that_was_used_is_replaced_and_a_second_drain_finds_one() -> None:
    cluster = Cluster(allocated=True)
    cluster.allocate(**OWN)
    cluster.pool()
    cluster.train(3)
    starter, launch = ordered(cluster, "launch")
    starter.say(launch, "running")
    cluster.join("n3", launched=True)
    assert cluster.order("expand") is None, "it has its standby"
    drain(cluster, "n1")
    cluster.train(3)
    given_back(cluster, "n1", **OWN)
    expanded(cluster, "n7", **OWN)
    cluster.pass_time(20)
    assert cluster.order("expand") is None
    assert cluster.order("release") is None, "one is what the job asked for"
    drain(cluster, "n2")
    cluster.train(3)
    assert cluster.member(2).agent.node == "n7"


def test_without_refills_only_ranks_that_must_move_get_a_node() -> None:
    cluster = job(pooled=False, refill=False)
    cluster.pass_time(20)
    assert cluster.order("expand") is None
    drain(cluster, "n1")
    assert ordered(cluster, "expand")[1].nodes == ("n7",)


def test_a_job_that_asked_for_no_standby_gets_none() -> None:
    cluster = job(standby=0)
    drain(cluster, "n1")
    cluster.pass_time(5)
    assert cluster.order("expand") is None


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ({"free": ()}, "reservation standby has no free node (2 in all)"),
        ({"problem": "there is no reservation standby"}, "there is no reservation standby"),
        ({"users": ("bob", "carol")}, "reservation standby is not for alice, only for bob, carol"),
        ({"nodes_per_job": 0}, "a job may hold 0"),
    ],
)
def test_who_waits_for_the_pool_is_told_why(pool: dict[str, Any], says: str) -> None:
    cluster = job(**pool)
    drain(cluster, "n1")
    cluster.pass_time(1)
    assert cluster.order("expand") is None
    assert says in cluster.daemon.sentences()["n1"]
    cluster.pool()
    assert ordered(cluster, "expand")[1].nodes == ("n7",), "it goes on once the obstacle is gone"


def preempted(now: float) -> dict[str, Any]:
    return {"preempted_s": now, "ends_s": now + 300.0}


def ending(now: float) -> dict[str, Any]:
    return {"ends_s": now + 8.0}


@pytest.mark.parametrize(
    ("end", "says"), [(preempted, "the resource manager has preempted the job"), (ending, "the job's time ends in ")]
)
def test_a_job_that_is_about_to_end_takes_no_node_for_ranks_that_should_move(
    end: Callable[[float], dict[str, Any]], says: str
) -> None:
    cluster = job()
    cluster.allocate(**end(cluster.now), **ASKED)
    drain(cluster, "n1")
    cluster.pass_time(1)
    assert cluster.order("expand") is None
    assert f"nothing comes from the pool: {says}" in cluster.daemon.sentences()["n1"]
    cluster.allocate(**ASKED)
    assert ordered(cluster, "expand")[1].nodes == ("n7",), "it goes on once the job is given more time"


@pytest.mark.parametrize("end", [preempted, ending])
def test_a_job_that_is_about_to_end_takes_no_node_for_a_lost_one(end: Callable[[float], dict[str, Any]]) -> None:
    cluster = job()
    cluster.allocate(**end(cluster.now), **ASKED)
    cluster.kill_node("n2")
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 1)
    assert cluster.order("expand") is None
    assert "nothing comes from the pool: the " in cluster.sentence()


@pytest.mark.parametrize("end", [preempted, ending])
def test_a_job_that_is_about_to_end_gets_no_standby_in_the_place_of_a_used_one(end: Callable[[float], dict[str, Any]]) -> None:
    cluster = Cluster(allocated=True, standbys=0)
    cluster.allocate(**end(cluster.now), **OWN)
    cluster.pool()
    cluster.train(3)
    assert cluster.order("expand") is None
    cluster.allocate(**OWN)
    assert ordered(cluster, "expand")[1].nodes == ("n7",)


def test_what_slurm_refuses_is_said_and_tried_again_on_another_node() -> None:
    cluster = job()
    drain(cluster, "n1")
    agent, order = ordered(cluster, "expand")
    agent.say(order, "failed", "salloc: error: Access denied to requested reservation")
    assert "Access denied to requested reservation" in cluster.daemon.sentences()["n1"]
    assert cluster.order("expand") is None
    cluster.pass_time(cluster.settings.agent_grace_s + 0.5)
    assert ordered(cluster, "expand")[1].nodes == ("n8",)


def test_a_companion_that_ends_before_its_agent_speaks_is_a_failure_with_a_pause() -> None:
    cluster = job(way="companion")
    drain(cluster, "n1")
    agent, order = ordered(cluster, "companion")
    agent.say(order, "done")
    cluster.allocate("n0", "n1", "n2", "n7", companions={"n7": "12"}, **ASKED)
    cluster.allocate("n0", "n1", "n2", **ASKED)
    assert "gone again before its agent spoke" in cluster.daemon.sentences()["n1"]
    assert cluster.order("companion") is None


def test_a_companion_whose_agent_never_comes_is_ended() -> None:
    cluster = job(way="companion")
    drain(cluster, "n1")
    agent, order = ordered(cluster, "companion")
    agent.say(order, "done")
    cluster.allocate("n0", "n1", "n2", "n7", companions={"n7": "12"}, **ASKED)
    cluster.pass_time(cluster.settings.order_timeout_s + 1)
    assert "12:n7" in cluster.released


def test_a_node_that_is_not_needed_after_all_is_given_back() -> None:
    """The drain is taken back once the node has come."""
    cluster = job()
    cluster.held.add("warm")
    drain(cluster, "n1")
    expanded(cluster, "n7", **ASKED)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "up", ""))
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 1)
    given_back(cluster, "n7", **ASKED)
    cluster.held.clear()
    cluster.train(2)
    assert [cluster.member(rank).agent.node for rank in range(3)] == ["n0", "n1", "n2"]
    drain(cluster, "n1")
    expanded(cluster, "n7", **ASKED)


def test_a_companion_s_node_goes_back_with_its_agent() -> None:
    cluster = job(way="companion")
    drain(cluster, "n1")
    agent, order = ordered(cluster, "companion")
    agent.say(order, "done")
    cluster.allocate("n0", "n1", "n2", "n7", companions={"n7": "12"}, **ASKED)
    companion = cluster.join("n7", launched=True, launches=False, grows=False)
    cluster.train(3)
    given_back(cluster, "n1", companions={"n7": "12"}, **ASKED)
    drain(cluster, "n7")
    agent, order = ordered(cluster, "companion")
    assert order.nodes == ("n8",)
    agent.say(order, "done")
    cluster.allocate("n0", "n2", "n7", "n8", companions={"n7": "12", "n8": "13"}, **ASKED)
    cluster.join("n8", launched=True, launches=False, grows=False)
    cluster.train(3)
    assert companion.job_over is not None
    assert cluster.order("release") is None, "the job itself gets no smaller"
    cluster.disconnect("n7")
    assert cluster.released == ["12:n7"]


def test_a_daemon_that_comes_back_takes_up_the_growth_that_is_under_way() -> None:
    cluster = job()
    drain(cluster, "n1")
    agent, order = ordered(cluster, "expand")
    agent.say(order, "running")
    cluster.restart_daemon()
    cluster.reconnect()
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "bad DIMM"))
    cluster.allocate(**ASKED)
    cluster.pool(free=("n8",))
    cluster.pass_time(1)
    assert ordered(cluster, "expand")[1].order_id == order.order_id, "no second one is begun"
    cluster.allocate(*cluster.allocation, "n7", **ASKED)
    cluster.join("n7", launched=True)
    cluster.train(3)
    assert cluster.member(1).agent.node == "n7"


def taken_and_given_back() -> Cluster:
    """n7 came, as n1 was to be left, and went again, as n1 was not."""
    cluster = job()
    cluster.held.add("warm")
    drain(cluster, "n1")
    expanded(cluster, "n7", **ASKED)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "up", ""))
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 1)
    return cluster


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_node_that_was_given_back_and_comes_again_while_the_daemon_is_away_is_kept(state: str) -> None:
    cluster = taken_and_given_back()
    given_back(cluster, "n7", **ASKED)
    cluster.held.clear()
    drain(cluster, "n1")
    agent, order = ordered(cluster, "expand")
    assert order.nodes == ("n7",)
    agent.say(order, "running")
    cluster.restart_daemon()
    agent.say(order, state)
    cluster.reconnect("n0", "n1", "n2")
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "bad DIMM"))
    cluster.allocate("n0", "n1", "n2", "n7", **ASKED)
    cluster.pool(free=("n8",))
    cluster.pass_time(1)
    assert cluster.order("release") is None, "it has just come"
    assert cluster.order("expand") is None, "one is enough"
    assert ordered(cluster, "launch")[1].nodes == ("n7",)
    cluster.join("n7", launched=True)
    cluster.train(3)
    assert cluster.member(1).agent.node == "n7"


def test_a_node_that_was_being_given_back_when_the_daemon_restarts_still_is() -> None:
    """The order that once took it does not bring it back."""
    cluster = taken_and_given_back()
    cluster.restart_daemon()
    cluster.reconnect("n0", "n1", "n2")
    cluster.allocate(**ASKED)
    cluster.pool(free=("n8",))
    cluster.pass_time(cluster.settings.agent_grace_s + cluster.settings.heartbeat_timeout_s + 1)
    given_back(cluster, "n7", **ASKED)


def test_an_agent_that_knows_nothing_of_pools_is_not_asked() -> None:
    cluster = Cluster(allocated=True, standbys=0, start=False)
    for node in ("n0", "n1", "n2"):
        cluster.join(node, grows=False)
    cluster.allocate(**ASKED)
    cluster.pool()
    cluster.train(3)
    drain(cluster, "n1")
    cluster.pass_time(1)
    assert cluster.order("expand") is None
    assert "a newer tmd-run" in cluster.daemon.sentences()["n1"]
