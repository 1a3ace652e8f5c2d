"""Nodes that the job itself holds (Slurm): where an agent is missing one is started, what the job has done with is given back,
and what cannot be given back stays. The agents' commands are a test's own words here; tests/slurm runs them."""

from __future__ import annotations

from tests.core.daemon_rig import Agent, Cluster
from tmd.protocol.agent import NodeOrder


def running(**arguments: object) -> Cluster:
    """Three ranks on n0 to n2, and a ready standby on n3."""
    cluster = Cluster(allocated=True, **arguments)  # type: ignore[arg-type]
    cluster.train(3)
    launched(cluster, "n3")
    return cluster


def launched(cluster: Cluster, node: str) -> Agent:
    """The launch that is outstanding succeeds."""
    agent, order = ordered(cluster, "launch")
    assert order.nodes == (node,)
    agent.say(order, "running")
    return cluster.join(node, launched=True)


def left(cluster: Cluster, node: str) -> None:
    """Its agent, which was sent away, ends."""
    over = cluster.agents[node].job_over
    assert over is not None, f"the agent of {node} was not sent away"
    cluster.disconnect(node)
    cluster.pass_time(0.5)


def ordered(cluster: Cluster, kind: str) -> tuple[Agent, NodeOrder]:
    found = cluster.order(kind)
    assert found is not None, f"no {kind} is ordered"
    return found


def drain(cluster: Cluster, node: str) -> None:
    cluster.do(cluster.daemon.node_state(cluster.now, node, "draining", "bad DIMM"))


def moved_off(cluster: Cluster, node: str) -> None:
    """A drain of this node, to the end of its migration."""
    drain(cluster, node)
    cluster.train(3)
    assert cluster.migration().state == "done"


# -------------------------------------------------------------------- launching


def test_a_node_without_agent_gets_one_from_the_batch_host() -> None:
    cluster = Cluster(allocated=True)
    agent, order = ordered(cluster, "launch")
    assert (agent.node, order.nodes) == ("n0", ("n3",))
    assert cluster.daemon.sentences()["n3"] == "its agent is being started from n0"
    launched(cluster, "n3")
    assert cluster.order("launch") is None
    assert cluster.standby_on("n3").core.phase == "ready"


def test_nobody_is_started_in_the_place_of_an_agent_that_is_on_its_way() -> None:
    cluster = Cluster(allocated=True, start=False)
    cluster.join("n0", node_index=0)
    cluster.allocate()
    assert cluster.order("launch") is None, "n1 and n2 have agents of the job's own srun"
    cluster.join("n1", node_index=1)
    cluster.join("n2", node_index=2)
    assert ordered(cluster, "launch")[1].nodes == ("n3",)


def test_an_agent_that_never_comes_is_replaced_before_the_start() -> None:
    cluster = Cluster(allocated=True, standbys=0, start=False)
    cluster.join("n0", node_index=0)
    cluster.join("n1", node_index=1)
    cluster.allocate()
    cluster.pass_time(cluster.settings.order_timeout_s)
    launched(cluster, "n2")
    cluster.train(2)


def test_a_launch_that_fails_is_tried_again_by_another_agent_and_the_operator_sees_why() -> None:
    cluster = Cluster(allocated=True)
    agent, order = ordered(cluster, "launch")
    agent.say(order, "failed", "srun: error: Unable to create step")
    assert cluster.order("launch") is None
    assert "Unable to create step" in cluster.daemon.sentences()["n3"]
    cluster.pass_time(cluster.settings.agent_grace_s + 0.5)
    again, second = ordered(cluster, "launch")
    assert again.node != agent.node
    assert second.order_id != order.order_id
    again.say(second, "failed", "again")
    cluster.pass_time(cluster.settings.agent_grace_s + 0.5)
    assert cluster.order("launch") is None, "pauses grow"


def test_a_launch_that_hangs_is_withdrawn() -> None:
    cluster = Cluster(allocated=True)
    agent, order = ordered(cluster, "launch")
    agent.say(order, "running")
    cluster.pass_time(cluster.settings.order_timeout_s + 0.5)
    assert agent.directive is not None
    assert agent.directive.withdrawn == (order.order_id,)
    agent.say(order, "failed", "ended by its agent")
    assert agent.directive.withdrawn == ()


def test_a_starter_that_dies_is_followed_by_another() -> None:
    cluster = Cluster(allocated=True)
    _, order = ordered(cluster, "launch")
    cluster.disconnect("n0")
    cluster.pass_time(2 * cluster.settings.agent_grace_s + 0.5)
    agent, second = ordered(cluster, "launch")
    assert agent.node != "n0"
    assert second.order_id != order.order_id


def test_a_node_whose_agent_was_lost_gets_another_one_after_a_pause() -> None:
    cluster = running()
    cluster.kill_node("n1")
    cluster.pass_time(cluster.settings.agent_grace_s + 1.0)
    cluster.train(2)
    assert cluster.order("launch") is None
    cluster.pass_time(2 * cluster.settings.heartbeat_timeout_s)
    launched(cluster, "n1")
    assert cluster.standby_on("n1").core.phase == "ready"


def test_a_restarted_daemon_takes_up_what_its_predecessor_has_begun() -> None:
    cluster = Cluster(allocated=True)
    agent, order = ordered(cluster, "launch")
    agent.say(order, "running")
    cluster.restart_daemon()
    cluster.reconnect()
    cluster.allocate()
    assert ordered(cluster, "launch") == (agent, order)
    cluster.pass_time(cluster.settings.order_timeout_s + 0.5)
    assert agent.directive is not None
    assert agent.directive.withdrawn == (order.order_id,)


def test_nothing_is_started_on_a_node_that_is_drained() -> None:
    cluster = Cluster(allocated=True, start=False)
    cluster.do(cluster.daemon.node_state(cluster.now, "n3", "drained", "maintenance"))
    for index in range(3):
        cluster.join(f"n{index}")
    cluster.allocate()
    assert cluster.order("launch") is None
    assert ordered(cluster, "release")[1].nodes == ("n3",)


# -------------------------------------------------------------------- giving back


def test_the_leaver_s_node_is_given_back_once_its_agent_has_left() -> None:
    cluster = running()
    moved_off(cluster, "n1")
    assert cluster.order("release") is None, "one that Slurm kills makes the user's srun fail"
    assert cluster.agents["n1"].job_over is not None
    assert cluster.agents["n1"].job_over.node_only
    left(cluster, "n1")
    agent, order = ordered(cluster, "release")
    assert (agent.node, order.nodes) == ("n0", ("n1",))
    agent.say(order, "done")
    assert cluster.order("release") is not None, "the resource manager has the last word"
    cluster.allocate("n0", "n2", "n3")
    assert cluster.order("release") is None
    assert cluster.released == []
    assert "given_back" in [event.kind for event in cluster.ledger.events if event.subject == "n1"]


def test_an_agent_that_does_not_leave_is_waited_for_but_not_for_ever() -> None:
    cluster = running()
    moved_off(cluster, "n1")
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 0.5)
    assert ordered(cluster, "release")[1].nodes == ("n1",)


def test_a_refused_release_is_tried_again_and_the_operator_sees_why() -> None:
    cluster = running()
    moved_off(cluster, "n1")
    left(cluster, "n1")
    agent, order = ordered(cluster, "release")
    agent.say(order, "failed", "slurm_update error: Requested operation is presently disabled")
    assert "presently disabled" in cluster.daemon.sentences()["n1"]
    cluster.pass_time(cluster.settings.agent_grace_s + 0.5)
    assert ordered(cluster, "release")[1].nodes == ("n1",)


def test_a_release_outlives_the_daemon() -> None:
    cluster = running()
    moved_off(cluster, "n1")
    left(cluster, "n1")
    cluster.restart_daemon()
    cluster.reconnect("n0", "n2", "n3")
    cluster.pass_time(1.0)
    assert cluster.order("release") is None, "nobody has said yet what the job holds"
    cluster.allocate()
    assert ordered(cluster, "release")[1].nodes == ("n1",)


def test_the_batch_host_is_emptied_and_stays_and_the_operator_is_told_what_is_safe() -> None:
    cluster = running()
    moved_off(cluster, "n0")
    assert cluster.order("release") is None
    assert cluster.agents["n0"].job_over is None, "the batch script waits for this agent"
    sentence = cluster.daemon.sentences()["n0"]
    assert "the batch script runs there" in sentence
    assert "Not safe: reboot" in sentence


def test_the_last_agent_of_the_job_s_own_srun_stays() -> None:
    """If it went, the srun in the script would end, then the script, and with it the job."""
    cluster = running()
    cluster.kill_node("n0")
    cluster.pass_time(cluster.settings.agent_grace_s + 1.0)
    cluster.train(2)
    cluster.allocate("n1", "n2", "n3", "n4", "n5")
    launched(cluster, "n4")
    launched(cluster, "n5")
    moved_off(cluster, "n1")
    moved_off(cluster, "n2")
    assert cluster.agents["n1"].job_over is not None
    assert cluster.agents["n2"].job_over is None
    assert "own srun" in cluster.daemon.sentences()["n2"]


def test_a_drained_standby_node_is_given_back() -> None:
    cluster = running()
    drain(cluster, "n3")
    left(cluster, "n3")
    assert ordered(cluster, "release")[1].nodes == ("n3",)
    cluster.train(2)


def test_a_node_that_is_being_given_back_takes_no_new_agent() -> None:
    cluster = running()
    moved_off(cluster, "n1")
    left(cluster, "n1")
    assert "is being given back" in cluster.join("n1", launched=True).refused


# -------------------------------------------------------------------- what the resource manager says


def test_ranks_leave_a_node_that_slurm_has_cut_out_though_its_agent_speaks() -> None:
    cluster = running()
    cluster.allocate("n0", "n2", "n3")
    cluster.train(3)
    assert cluster.migration().state == "done"
    assert "no longer part of the job's allocation" in cluster.migration().trigger


def test_a_node_that_was_cut_out_and_is_then_called_down_is_left_all_the_same() -> None:
    """Slurm says so in this order, or tmd asks in this order; the agent speaks on."""
    cluster = running()
    cluster.held.add("state")
    cluster.allocate("n0", "n2", "n3")
    assert cluster.migration().ended_s is None
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "down", "Not responding"))
    assert cluster.migration().ended_s is None, cluster.migration().reason


def test_a_node_that_is_called_down_but_speaks_is_left_in_order() -> None:
    cluster = running()
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "down", "not responding"))
    for _ in range(12):
        cluster.pass_time(0.5)
        cluster.train(1)
    assert (cluster.migration().kind, cluster.migration().state) == ("planned", "done")


def test_the_end_of_the_allocation_ends_the_job() -> None:
    cluster = running()
    cluster.allocate(state="over", reason="CANCELLED by 0")
    assert cluster.job.state == "failed"
    assert "CANCELLED by 0" in cluster.job.reason


def test_a_cancelled_job_says_so_though_its_ranks_are_gone_first() -> None:
    cluster = running()
    for process in [*map(cluster.member, range(3)), cluster.standby_on("n3")]:
        process.die()
    cluster.settle()
    assert "waiting for the resource manager's word" in cluster.sentence()
    cluster.allocate(state="over", reason="Slurm calls the job CANCELLED")
    assert "CANCELLED" in cluster.job.reason


def test_a_job_that_is_listed_no_more_is_over_and_one_that_never_was_is_not() -> None:
    cluster = Cluster(allocated=True)
    cluster.allocate(state="unlisted", nodes=())
    assert cluster.job.state == "failed"
    other = Cluster(allocated=True, start=False)
    for index in range(4):
        other.join(f"n{index}")
    other.allocate(state="unlisted", nodes=())
    other.train(2)
    moved_off(other, "n1")
    assert other.released == ["n1"], "nodes of such a job are the resource manager's business"


def test_the_silence_of_a_suspended_job_means_nothing() -> None:
    cluster = running()
    before = cluster.incarnations()
    for node in ("n0", "n1", "n2", "n3"):
        cluster.stop_node(node)
    cluster.allocate(state="suspended", reason="")
    cluster.pass_time(100.0)
    assert cluster.sentence().startswith("suspended")
    cluster.allocate()
    for node in ("n0", "n1", "n2", "n3"):
        cluster.stop_node(node, stopped=False)
    cluster.pass_time(1.0)
    cluster.train(2)
    assert cluster.incarnations() == before


def test_people_are_told_that_the_job_s_time_ends() -> None:
    cluster = running()
    cluster.allocate(ends_s=cluster.now + 300.0)
    cluster.allocate(ends_s=cluster.now + 300.0, reason="asked again")
    assert [event.text for event in cluster.ledger.events if event.kind == "notice"] == ["the job's time ends in 5 min"]
