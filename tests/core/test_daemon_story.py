"""What the daemon tells: stories from the log, sentences, views; and what it costs to listen."""

from __future__ import annotations

import pytest

from tests.core.daemon_rig import Cluster
from tmd.core.instructions import DirectAgent
from tmd.core.records import EventRecord
from tmd.core.story import story


def event(event_id: int, cause: int, subject: str) -> EventRecord:
    return EventRecord(event_id=event_id, cause=cause, time_s=0.0, job_id="j", subject=subject, kind="k", text="t")


def test_a_story_holds_what_led_to_an_object_and_nothing_else() -> None:
    events = [event(1, 0, "n1"), event(2, 1, "j.2"), event(3, 0, "n9"), event(4, 2, "m4"), event(5, 4, "j.7"), event(6, 4, "m4")]
    assert [told.event_id for told in story(reversed(events), "m4")] == [1, 2, 4, 6]
    assert story(events, "unknown") == []


def test_the_story_of_a_recovery_begins_with_the_lost_process() -> None:
    cluster = Cluster(nnodes=3, standbys=1)
    cluster.train(3)
    cluster.kill_node("n1")
    cluster.train(1)
    told = story(cluster.ledger.events, cluster.migration().migration_id)
    kinds = [one.kind for one in told]
    assert [kind for kind in kinds if kind in ("disconnected", "lost", "resolved", "selected", "go", "done")] == [
        "disconnected",
        "lost",
        "lost",
        "resolved",
        "selected",
        "go",
        "done",
    ]


def test_the_story_of_a_drain_begins_with_the_node() -> None:
    cluster = Cluster(nnodes=3, standbys=1)
    cluster.train(3)
    cluster.do(cluster.daemon.node_state(cluster.now, "n1", "draining", "fan broken"))
    cluster.train(2)
    told = story(cluster.ledger.events, cluster.migration().migration_id)
    assert [one.kind for one in told] == ["node", "requested", "planned", "prepared", "armed", "flipped", "done"]
    assert told[0].text == "n1 is draining: fan broken"


def test_every_object_has_a_sentence() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    cluster.train(3)
    assert cluster.daemon.sentences() == {
        "j": "running",
        "n0": "trains rank 0",
        "n1": "trains rank 1",
        "n2": "holds standbys",
        "j.3": "ready",
    }


def test_a_job_that_has_ended_shows_the_number_of_its_steps_after_a_restart_too() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    cluster.train(10)
    cluster.vote()  # the one after the last step
    cluster.finish(0)
    view = cluster.daemon.job("j")
    assert view is not None
    assert (view.next_step, view.ranks[0].next_step) == (10, 10)
    cluster.finish(1)
    for _ in range(2):
        view = cluster.daemon.job("j")
        assert view is not None
        assert (view.record.state, view.next_step) == ("done", 10)
        cluster.restart_daemon()


def test_views_show_live_numbers() -> None:
    cluster = Cluster(nnodes=2, standbys=1)
    cluster.train(10)
    cluster.pass_time(0.5)
    view = cluster.daemon.job("j")
    assert view is not None
    assert view.next_step == 10
    assert view.normal_step_s == pytest.approx(0.1)
    assert [(rank.pid, rank.host, rank.phase, rank.connected) for rank in view.ranks] == [
        (7, "n0", "running", True),
        (7, "n1", "running", True),
    ]
    assert [(node.record.node, node.ranks, node.standbys_ready) for node in cluster.daemon.nodes()] == [
        ("n0", (0,), 0),
        ("n1", (1,), 0),
        ("n2", (), 1),
    ]
    assert cluster.daemon.job("k") is None


def test_a_directive_that_was_lost_is_said_again_to_an_agent_that_speaks() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    agent = cluster.agents["n0"]
    cluster.batches.clear()
    cluster.pass_time(2.0)
    again = [
        part.directive
        for batch in cluster.batches
        for part in batch
        if isinstance(part, DirectAgent) and part.agent_id == agent.agent_id
    ]
    assert len(again) >= 3
    assert {directive.sequence for directive in again} == {agent.directive.sequence}  # type: ignore[union-attr]


def test_validate_names_what_is_wrong() -> None:
    cluster = Cluster(nnodes=2, standbys=0)
    cluster.daemon.validate()
    job = cluster.daemon._jobs["j"]
    job.evolve(cluster.now, poison_epoch=job.record.epoch_limit + 1)
    with pytest.raises(AssertionError, match="poison 1 beyond the limit 0"):
        cluster.daemon.validate()
