"""Announced maintenance: nodes that it comes near are left like drained ones, and only by jobs that it concerns."""

from __future__ import annotations

from tests.core.daemon_rig import Cluster
from tests.core.test_daemon_allocation import drain, left, ordered, running
from tmd.core.maintenance import Maintenance

LEAD_S = 900.0
LENGTH_S = 3600.0


def announce(cluster: Cluster, *nodes: str, in_s: float, name: str = "fans") -> Maintenance:
    """Of nodes that are up, unless they are drained."""
    for node in nodes:
        if cluster.ledger.nodes[cluster.job_id, node].state == "unknown":
            cluster.do(cluster.daemon.node_state(cluster.now, node, "up", ""))
    start_s = cluster.now + in_s
    announced = Maintenance(name=name, start_s=start_s, end_s=start_s + LENGTH_S, nodes=nodes)
    cluster.do(cluster.daemon.maintenance(cluster.now, [announced]))
    return announced


def state_of(cluster: Cluster, node: str) -> tuple[str, str]:
    record = cluster.ledger.nodes[cluster.job_id, node]
    return record.state, record.reason


def test_ranks_leave_a_node_before_maintenance_begins_and_its_node_is_given_back() -> None:
    cluster = running()
    announced = announce(cluster, "n1", in_s=LEAD_S - 1)
    cluster.train(3)
    assert (cluster.migration().state, cluster.migration().from_nodes) == ("done", ("n1",))
    assert cluster.migration().trigger == f"drain of n1: {announced.reason}"
    left(cluster, "n1")
    assert ordered(cluster, "release")[1].nodes == ("n1",)


def test_maintenance_that_is_far_off_moves_nobody_until_it_comes_near() -> None:
    cluster = running()
    announce(cluster, "n1", in_s=LEAD_S + 5)
    cluster.pass_time(4.0)
    assert not cluster.ledger.migrations
    cluster.pass_time(1.5)
    cluster.train(3)
    assert cluster.migration().state == "done"


def test_the_daemon_wants_to_be_woken_when_maintenance_comes_near() -> None:
    cluster = running()
    announce(cluster, "n1", in_s=LEAD_S + 0.1)
    deadline = cluster.daemon.next_deadline()
    assert deadline is not None
    assert deadline <= cluster.now + 0.1


def test_a_standby_on_such_a_node_takes_no_role_and_is_given_back() -> None:
    cluster = running()
    announce(cluster, "n3", in_s=1.0)
    drain(cluster, "n1")
    cluster.train(3)
    assert not cluster.ledger.migrations
    assert "(0 usable)" in cluster.daemon.sentences()["n1"]
    left(cluster, "n3")
    assert ordered(cluster, "release")[1].nodes == ("n3",)


def test_maintenance_that_is_called_off_before_the_flip_moves_nobody() -> None:
    cluster = running()
    cluster.held.add("staging")
    announce(cluster, "n1", in_s=1.0)
    assert cluster.migration().ended_s is None
    cluster.do(cluster.daemon.maintenance(cluster.now, []))
    cluster.train(2)
    assert cluster.migration().state == "aborted"
    assert cluster.migration().reason == "n1 is up again"
    assert state_of(cluster, "n1") == ("up", "")


def test_a_job_that_ends_before_or_runs_within_the_reservation_stays() -> None:
    for word in ({"ends_s": 1500.0}, {"reservation": "fans"}):
        cluster = running()
        cluster.allocate(**word)
        announce(cluster, "n1", in_s=800.0)
        cluster.train(3)
        assert not cluster.ledger.migrations, word


def test_a_drain_keeps_its_reason_and_outlives_the_maintenance() -> None:
    cluster = running()
    cluster.held.add("staging")
    drain(cluster, "n1")
    announce(cluster, "n1", in_s=1.0)
    assert state_of(cluster, "n1") == ("draining", "bad DIMM")
    cluster.do(cluster.daemon.maintenance(cluster.now, []))
    assert state_of(cluster, "n1") == ("draining", "bad DIMM")


def test_the_end_of_a_drain_does_not_hide_the_maintenance() -> None:
    cluster = running()
    cluster.held.add("staging")
    drain(cluster, "n1")
    announced = announce(cluster, "n1", in_s=1.0)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "up", ""))
    assert state_of(cluster, "n1") == ("draining", announced.reason)


def test_a_restarted_daemon_goes_on_leaving_before_it_has_heard_of_the_maintenance_again() -> None:
    cluster = running()
    cluster.held.add("staging")
    announced = announce(cluster, "n1", in_s=1.0)
    cluster.restart_daemon()
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "up", ""))
    cluster.reconnect()
    cluster.allocate()
    assert cluster.migration().ended_s is None
    cluster.do(cluster.daemon.maintenance(cluster.now, [announced]))
    cluster.pass_time(10.0)
    assert cluster.migration().ended_s is None
    assert state_of(cluster, "n1") == ("draining", announced.reason)


def test_once_it_is_over_the_node_is_as_good_as_any() -> None:
    cluster = running()
    cluster.allocate(batch_host="n1")  # so that it stays in the job
    announced = announce(cluster, "n1", in_s=1.0)
    cluster.train(3)
    assert cluster.migration().state == "done"
    cluster.pass_time(announced.end_s - cluster.now + 1.0)
    assert state_of(cluster, "n1") == ("up", "")
