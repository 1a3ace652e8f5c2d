"""What a migration cost, on a clock that the test turns: six phases, downtime, lost time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.daemon_rig import STEP_S, Cluster
from tmd.core.records import PHASES
from tmd.core.timings import CommitLog, Window, phases
from tmd.protocol.handoff import HandoffReport


def running(**settings: Any) -> Cluster:
    cluster = Cluster(nnodes=3, standbys=1, **settings)
    cluster.train(20)
    cluster.pass_time(0.0)
    for agent in cluster.agents.values():
        cluster._speak(agent, always=True)
    return cluster


def after(cluster: Cluster, steps: int = 8) -> None:
    """Further steps, and the heartbeats that tell of them."""
    cluster.train(steps)
    cluster.pass_time(0.5)


def test_a_recovery_is_timed_phase_by_phase() -> None:
    """From the kill: 0.02 s until it is seen, 0.3 s until the joiner is linked, 0.2 s until it has its state, a step."""
    cluster = running()
    cluster.held |= {"links", "state"}
    process = cluster.member(1)
    process.die()
    cluster.now += 0.02
    cluster.settle()
    cluster.now += 0.3
    cluster.held.remove("links")
    for rank in cluster.ranks.values():
        if rank.alive:
            rank.carry_out(rank.core.links_ready(1, 4))
    cluster.settle()
    cluster.now += 0.2
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    migration = cluster.migration()
    assert migration.phases_s == pytest.approx(
        {"detect": 0.02, "select": 0.0, "prepare": 0.0, "install": 0.3, "copy": 0.2, "first_step": STEP_S}
    )
    assert migration.downtime_s == pytest.approx(0.52)
    assert migration.downtime_steps == pytest.approx(0.52 / STEP_S)
    assert migration.lost_time_s == pytest.approx(0.52)
    assert migration.normal_step_s == pytest.approx(STEP_S)
    assert migration.steps_redone == 1


def test_a_node_that_loses_power_is_detected_from_when_its_peers_lost_their_links() -> None:
    """Nobody sees its processes exit; the daemon hears of it only when the connection of the agent closes."""
    cluster = running()
    node = cluster.agents["n1"]
    for rank in node.ranks():
        rank.die()
        rank.exit_seen_s = 0.0
        cluster.links_closed(rank, 0, orderly=False)
    lost_s = cluster.now
    cluster.now += 0.25
    cluster.disconnect("n1")
    after(cluster)
    migration = cluster.migration()
    assert (migration.started_s, migration.phases_s["detect"]) == pytest.approx((lost_s, 0.25))


def test_a_node_that_falls_silent_is_detected_from_its_last_word() -> None:
    cluster = running()
    last_word_s = cluster.now
    cluster.stop_node("n1")
    cluster.pass_time(cluster.settings.heartbeat_timeout_s + 1.0)
    after(cluster)
    migration = cluster.migration()
    assert migration.started_s == pytest.approx(last_word_s)
    assert migration.phases_s["detect"] >= cluster.settings.heartbeat_timeout_s


def test_a_planned_move_is_timed_phase_by_phase() -> None:
    """0.5 s until all is staged while training goes on, 0.3 s from the flip to the joiner's state."""
    cluster = running()
    cluster.held |= {"staging", "state"}
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    cluster.train(5)
    cluster.held.remove("staging")
    for rank in cluster.ranks.values():
        if rank.alive:
            rank.carry_out(rank.core.staged(1, 1))
    cluster.settle()
    cluster.train()
    cluster.now += 0.3
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    migration = cluster.ledger.migrations[migration_id]
    assert migration.phases_s == pytest.approx(
        {"detect": 0.0, "select": 0.0, "prepare": 0.0, "install": 0.5, "copy": 0.3, "first_step": STEP_S}
    )
    assert migration.downtime_s == pytest.approx(0.3)
    assert migration.lost_time_s == pytest.approx(0.3)
    assert (migration.steps_redone, migration.stayer_links_reopened) == (0, 0)


def moving(cluster: Cluster) -> str:
    """Rank 1 has flipped away, and its joiner waits for the state."""
    cluster.held.add("state")
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    cluster.train()
    return migration_id


def test_a_joiner_whose_report_comes_late_is_waited_for() -> None:
    """The stayers tell of the last step of the window first; how long the joiner copied is known to the joiner alone."""
    cluster = running()
    migration_id = moving(cluster)
    joiner = cluster.agents["n3"]
    joiner.connected = False
    cluster.now += 0.3
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    assert cluster.ledger.migrations[migration_id].lost_time_s is None
    joiner.connected = True
    cluster.pass_time(0.5)
    migration = cluster.ledger.migrations[migration_id]
    assert migration.lost_time_s == pytest.approx(0.3)
    assert migration.phases_s["copy"] == pytest.approx(0.3)


def test_copying_begins_when_the_leaver_freezes_if_the_stayers_come_to_their_boundary_later() -> None:
    cluster = running()
    leaver = cluster.member(1)
    migration_id = moving(cluster)
    flipped_s = leaver.core.stamps["flip"]
    for rank in (0, 2):
        cluster.member(rank).core.stamps["flip"] = flipped_s + 0.1
    cluster.now += 0.3
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    assert cluster.ledger.migrations[migration_id].phases_s["copy"] == pytest.approx(0.3)


def test_a_planned_move_shows_what_the_stayers_and_the_joiner_counted() -> None:
    """A link between two stayers is counted by both. What a recovery opened before is not of this migration."""
    cluster = running()
    for rank in (0, 2):
        cluster.member(rank).core.count("stayer_links_reopened", 5)
    cluster.pass_time(0.5)
    migration_id = moving(cluster)
    joiner = next(rank for rank in cluster.agents["n3"].ranks() if rank.core.rank == 1)
    joiner.core.count("state_bytes", 1 << 20)
    report = HandoffReport(
        transport="tcp", why="rdma has no device here", source="rank 1 on n1", bytes_by_transport={"tcp": 1 << 20}
    )
    joiner.core.handoff = report
    for rank in (0, 2):
        cluster.member(rank).core.count("stayer_links_reopened", 3)
        cluster.member(rank).core.count("survivor_links_reopened", 7)
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    migration = cluster.ledger.migrations[migration_id]
    assert (migration.stayer_links_reopened, migration.bytes_moved) == (3, 1 << 20)
    assert migration.handoffs == {1: report}


def test_a_recovery_shows_the_links_that_the_survivors_opened_anew() -> None:
    cluster = running()
    cluster.held.add("state")
    cluster.kill_rank(1)
    for rank in (0, 2):
        cluster.member(rank).core.count("survivor_links_reopened", 4)
    cluster.held.clear()
    cluster.settle()
    after(cluster)
    assert cluster.migration().stayer_links_reopened == 4


def test_no_downtime_is_less_than_nothing() -> None:
    """The first step with the joiner was faster than a normal one."""
    cluster = running()
    migration_id = moving(cluster)
    cluster.held.clear()
    cluster.settle()
    cluster.now -= STEP_S / 2
    after(cluster)
    migration = cluster.ledger.migrations[migration_id]
    assert (migration.downtime_s, migration.downtime_steps) == (0.0, 0.0)
    assert migration.lost_time_s == pytest.approx(-STEP_S / 2)


def test_lost_time_counts_slow_steps_before_the_switchover_too() -> None:
    """Preparation that slows training is not free, though it is no downtime."""
    cluster = running()
    cluster.held.add("staging")
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    for _ in range(4):
        cluster.now += STEP_S / 2
        cluster.train()
    cluster.held.clear()
    for rank in cluster.ranks.values():
        if rank.alive:
            rank.carry_out(rank.core.staged(1, 1))
    cluster.settle()
    after(cluster)
    migration = cluster.ledger.migrations[migration_id]
    assert migration.downtime_s == pytest.approx(0.0)
    assert migration.lost_time_s == pytest.approx(4 * STEP_S / 2)


def test_a_queued_request_waits_in_the_phase_detect() -> None:
    cluster = running()
    cluster.do(cluster.daemon.set_paused(cluster.now, True, "root"))
    migration_id, out = cluster.daemon.request_migration(cluster.now, "j", rank=1, who="root")
    cluster.do(out)
    cluster.train(3)
    cluster.do(cluster.daemon.set_paused(cluster.now, False, "root"))
    after(cluster)
    assert cluster.ledger.migrations[migration_id].phases_s["detect"] == pytest.approx(3 * STEP_S)


def test_phases_never_run_backwards_whatever_the_stamps_say() -> None:
    window = Window(kind="unplanned", started_s=10.0, first=None, normal_step_s=None, counters={})
    window.marks = {"detect": 11.0, "select": 10.5, "install": 12.0, "copy": 11.0}
    durations = phases(window, first_step_s=12.5)
    assert list(durations) == list(PHASES)
    assert durations == {"detect": 1.0, "select": 0.0, "prepare": 0.0, "install": 1.0, "copy": 0.0, "first_step": 0.5}
    window.marks["copy"] = 13.0
    assert phases(window, first_step_s=12.5)["copy"] == 0.5


def test_a_normal_step_needs_a_few_samples() -> None:
    assert CommitLog().normal_step_s() is None
