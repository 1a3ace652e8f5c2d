"""Who is let into a job, and what those who are not are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.core.daemon_rig import Cluster
from tmd.core.daemon import STRANGER_KEPT_S
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.keys import fingerprint


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"protocol": (PROTOCOL[0] + 1, 0)}, "install the same tmd major version"),
        ({"nnodes": 5}, "--nnodes 5 --nproc-per-node 1, the job has --nnodes 2 --nproc-per-node 1"),
        ({"nproc_per_node": 0}, "both must be at least 1"),
        ({"uid": 1001}, "runs as uid 1001, the job belongs to uid 1000"),
        ({"command": ("other.py",)}, "it runs 'other.py', the job runs 'train.py'"),
        ({"script_digest": "d2"}, "its script has digest d2, the job's has d1"),
        ({"versions": {"torch": "3", "cpu_capability": "AVX2"}}, "torch is 3 there and 2 on the job's first node"),
        ({"versions": {"torch": "2", "cpu_capability": "AVX512"}}, "cpu_capability is AVX512 there and AVX2"),
        ({"versions": {"torch": "2", "cpu_capability": "AVX2", "threads": "4"}}, "OMP_NUM_THREADS is 4 there and missing"),
        ({"versions": {"torch": "2"}}, "cpu_capability is missing there and AVX2"),
        ({"job_id": ""}, "names no job, no node or no agent"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused_with_what_differs(changes: dict[str, Any], told: str) -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    agent = cluster.join("stranger", **changes)
    assert told in agent.refused
    assert not agent.ranks()


def test_an_older_minor_version_is_served() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    assert not cluster.join("n9", protocol=(PROTOCOL[0], PROTOCOL[1] + 7)).refused


def test_a_node_with_a_living_agent_takes_no_second_one() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    first = cluster.agents["n0"]
    second = cluster.join("n0")
    assert f"node n0 already has an agent in job j ({first.agent_id})" in second.refused


def test_two_agents_with_the_same_index_do_not_fit() -> None:
    cluster = Cluster(nnodes=2, start=False)
    cluster.join("n0", node_index=0)
    assert "position 0 is already taken by n0" in cluster.join("n1", node_index=0).refused


def test_a_node_that_comes_back_is_a_standby_node_and_its_former_agent_is_refused() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    cluster.train(3)
    cluster.kill_node("n1")
    former = cluster.agents["n1"]
    assert cluster.daemon.job("j").ranks[1].record.node == "n2"  # type: ignore[union-attr]
    cluster.agents["former"] = former
    cluster.say_hello(former)
    assert "was given up" in former.refused
    assert "start tmd-run again" in former.refused
    back = cluster.join("n1")
    assert not back.refused
    assert [standby.record.node for standby in cluster.daemon.standbys()] == ["n1"]
    cluster.train(3)


def test_the_former_agent_is_refused_by_a_restarted_daemon_too() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    cluster.train(3)
    cluster.kill_node("n1")
    former = cluster.agents.pop("n1")
    cluster.join("n1")
    cluster.restart_daemon()
    cluster.reconnect()
    cluster.agents["former"] = former
    cluster.say_hello(former)
    assert "was replaced" in former.refused


def test_an_agent_that_reconnects_is_told_again_what_to_do_and_nothing_starts_twice() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    processes = set(cluster.ranks)
    for node in ("n0", "n1", "n2"):
        cluster.disconnect(node)
        cluster.say_hello(cluster.agents[node])
    assert set(cluster.ranks) == processes
    assert all(rank.alive for rank in cluster.ranks.values())
    cluster.train(2)


def test_agents_that_run_under_another_ledger_are_turned_away_without_proof_and_nothing_is_done_to_them() -> None:
    """The ledger was emptied while job j ran: the agents know its key, this daemon does not."""
    cluster = Cluster(nnodes=2, start=False)
    for node in ("n0", "n1"):
        agent = cluster.join(node, key_fingerprint=fingerprint(b"of the old ledger"), generation=4)
        assert agent.refused.startswith("job j runs under another ledger, this one does not know it")
    assert cluster.refusals == [("", 1), ("", 1)]
    assert (cluster.ledger.jobs, cluster.ranks) == ({}, {})
    assert cluster.sentence().startswith("job j runs under another ledger")
    assert [event.kind for event in cluster.ledger.events] == ["refused"], "it is told once, though they come again and again"


def test_a_new_agent_does_not_begin_a_job_anew_that_runs_under_another_ledger() -> None:
    cluster = Cluster(nnodes=2, start=False)
    cluster.join("n0", key_fingerprint=fingerprint(b"of the old ledger"))
    assert "runs under another ledger" in cluster.join("n2").refused
    assert cluster.ledger.jobs == {}
    cluster.pass_time(STRANGER_KEPT_S)
    assert not cluster.join("n3").refused, "the old agents have gone"


def test_a_ledger_that_has_another_key_for_the_job_does_not_touch_its_ranks() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    cluster.train(2)
    stranger = cluster.join("n1", key_fingerprint=fingerprint(b"of the old ledger"))
    assert "this one has another key for it" in stranger.refused
    assert cluster.refusals == [("", 1)]
    cluster.train(2)


def test_a_ledger_that_is_older_than_the_running_job_does_not_touch_its_ranks() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    stranger = cluster.join("n1", key_fingerprint=fingerprint(b"key"), generation=2)
    assert "this one is older (life 1 of the daemon here, 2 there)" in stranger.refused


def test_the_refusal_of_an_agent_whose_life_is_over_proves_that_it_comes_from_the_jobs_own_daemon() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    cluster.train(3)
    cluster.kill_node("n1")
    former = cluster.agents["n1"]
    former.hello = msgspec.structs.replace(former.hello, key_fingerprint=fingerprint(b"key"), generation=1)
    cluster.say_hello(former)
    assert cluster.refusals == [(fingerprint(b"key"), 1)]


def test_a_job_that_has_ended_tells_its_agents_again_and_takes_no_new_ones() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    cluster.do(cluster.daemon.cancel_job(cluster.now, "j", "root"))
    assert "has ended (failed: cancelled by root)" in cluster.join("n7").refused
    agent = cluster.agents["n0"]
    agent.job_over = None
    cluster.say_hello(agent)
    assert agent.job_over is not None
    assert agent.job_over.exit_code == 143
