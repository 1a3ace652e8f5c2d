"""Losses of ranks, agents and nodes: the job goes on with standbys, and nobody could tell from its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import WORLD_SIZE, Cluster, Job, until
from tests.e2e.losses_rig import LongJob, continue_stopped, running_agents, stayers
from tmd.core.records import PHASES

RANKS = set(range(WORLD_SIZE))


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    with Cluster(tmp_path_factory.mktemp("losses"), nodes=6) as cluster:
        yield LongJob(cluster, reference)


@pytest.fixture
def job(losing: LongJob) -> Job:
    """Whole and running, with two standbys ready."""
    return losing.whole()


def test_a_killed_rank_is_replaced_and_no_other_process_notices(losing: LongJob, job: Job) -> None:
    before, epoch = job.pids(), job.record()["epoch"]
    losing.kill_rank(2)
    record = losing.recovered(2)
    assert list(record["leavers"]) == ["2"]
    assert "rank 2" in record["trigger"]
    assert record["record_origin"] in ("exact", "assumed")
    assert list(record["phases_s"]) == list(PHASES)
    assert min(record["phases_s"].values()) >= 0
    assert record["downtime_s"] >= 0  # beyond a normal step; a step that is waited for at its end hides a short one
    assert stayers(before, job.pids()) == RANKS - {2}
    assert job.record()["epoch"] == epoch + 1


def test_a_killed_agent_takes_its_ranks_along_and_its_node_is_replaced(losing: LongJob, job: Job) -> None:
    before, node = job.pids(), job.node_of(1)
    losing.kill(running_agents(job)[node], rank=1)
    losing.recovered(1)
    assert stayers(before, job.pids()) == RANKS - {1}
    assert job.use_of(node)["use"] == "lost"


def test_a_node_without_power_is_replaced_and_comes_back_as_a_new_standby(losing: LongJob, job: Job) -> None:
    node, before = job.node_of(3), job.rank(3)["record"]["incarnation"]
    losing.power_off(3)
    losing.recovered(3)
    losing.cluster.reboot(node)
    standbys = until(lambda: [each for each in job.wait_ready(2) if each["record"]["node"] == node], f"{node} is a standby again")
    assert before not in {each["record"]["incarnation"] for each in standbys}
    assert job.use_of(node)["use"] == "standby"


def test_a_node_that_an_operator_sets_down_is_replaced(losing: LongJob, job: Job) -> None:
    node = job.node_of(0)
    losing.kills[0] += 1
    losing.cluster.ask("local", "down", node, "--reason", "smoke in rack 3")
    assert losing.recovered(0)["from_nodes"] == [node]
    assert losing.cluster.node(node)["manager_state"] == "DOWN"


def test_two_nodes_that_are_not_buddies_are_lost_at_once(losing: LongJob, job: Job) -> None:
    before = job.pids()
    losing.power_off(0, 2)
    losing.recovered(0, 2)
    assert stayers(before, job.pids()) == {1, 3}


def test_a_second_loss_while_the_first_is_being_recovered(losing: LongJob, job: Job) -> None:
    """1. Rank 1 is lost. 2. The new epoch is being installed; rank 3 has read the order. 3. Rank 3 is lost."""
    fault = job.faults.arm("stop", "install.received", 3)
    losing.kill_rank(1)
    losing.kill(fault.stopped_pid(), rank=3)
    losing.recovered(1, 3)


def test_two_losses_in_a_row_use_both_standbys(losing: LongJob, job: Job) -> None:
    standbys = {each["record"]["incarnation"] for each in job.wait_ready(2)}
    losing.power_off(1)
    losing.recovered(1)
    losing.power_off(2)
    losing.recovered(2)
    assert {job.rank(rank)["record"]["incarnation"] for rank in (1, 2)} == standbys


def test_a_cut_link_is_opened_again_and_costs_no_standby(losing: LongJob, job: Job) -> None:
    before, epoch, moves = job.pids(), job.record()["epoch"], len(job.migrations())
    standbys = {each["record"]["incarnation"] for each in job.wait_ready(2)}
    job.faults.arm("close_link", "optimizer.begin", 2).pid()
    until(lambda: job.record()["epoch"] > epoch and job.record()["state"] == "running", "a new epoch runs")
    job.wait_progress()
    losing.assert_unharmed()
    assert job.record()["epoch"] == epoch + 1
    assert job.pids() == before
    assert len(job.migrations()) == moves
    assert {each["record"]["incarnation"] for each in job.wait_ready(2)} == standbys


@pytest.mark.parametrize(("moment", "outcome"), [("staged", {"aborted"}), ("flip", {"aborted", "done"})])
def test_a_stayer_is_lost_while_another_rank_moves(losing: LongJob, job: Job, moment: str, outcome: set[str]) -> None:
    """Before the flip the leaver goes on; at the flip either the leaver or the joiner does: one of them, in both cases."""
    fault = job.faults.arm("stop", moment, 3)
    move = job.request("--rank", "0")
    losing.kill(fault.stopped_pid(), rank=3)
    losing.recovered(3)
    record = until(lambda: (found := job.migration(move))["ended_s"] is not None and found, f"{move} has ended")
    assert record["state"] in outcome
    assert record["reason"]
    holder = record["joiners"]["0"] if record["state"] == "done" else record["leavers"]["0"]
    assert job.rank(0)["record"]["incarnation"] == holder


@pytest.mark.parametrize("who", ["leaver", "joiner"])
def test_the_node_of_a_move_in_progress_is_lost(losing: LongJob, job: Job, who: str) -> None:
    fault = job.faults.arm("stop", "staged", {"leaver": 3, "joiner": 0}[who])
    move = job.request("--rank", "1")
    stayer = fault.stopped_pid()
    record = job.migration(move)
    node = record["from_nodes"][0] if who == "leaver" else record["to_nodes"][0]
    losing.kills[1] += who == "leaver"
    losing.cluster.ask("local", "kill", node)
    continue_stopped(stayer)
    record = until(lambda: (found := job.migration(move))["ended_s"] is not None and found, f"{move} has ended")
    assert record["reason"]
    job.wait_progress()
    losing.assert_unharmed()
    assert job.node_of(1) != node


def test_without_a_standby_survivors_hold_until_a_node_comes_back(losing: LongJob, job: Job) -> None:
    """The last rank is lost: of all ranks it is the one whose answers of the build new standbys take while it lives."""
    spare = [each["record"]["node"] for each in job.wait_ready(2)]
    for node in spare:
        losing.cluster.ask("local", "kill", node)
    lost = job.node_of(3)
    before = job.pids()
    losing.power_off(3)
    until(lambda: "waiting for a standby" in job.view()["sentence"], "the job says what it waits for")
    assert "rank 3 has no holder" in job.view()["sentence"]
    assert "start tmd-run on another node or bring one back" in job.view()["sentence"]
    losing.cluster.ask("local", "up", spare[0])
    record = losing.recovered(3)
    assert record["to_nodes"] == [spare[0]]
    assert record["from_nodes"] == [lost]
    assert stayers(before, job.pids()) == RANKS - {3}


def test_after_all_this_the_job_ends_as_if_nothing_had_happened(losing: LongJob, job: Job) -> None:
    losing.finish()
    losing.assert_unharmed()
    assert len(job.results()) >= WORLD_SIZE * (len(losing.reference.results()) // WORLD_SIZE) - losing.kills.total()
    codes = {agent["node"]: agent["exit_code"] for agent in job.agents()}  # of the last life on each node
    assert {codes[job.node_of(rank)] for rank in RANKS} == {0}
    for record, after in itertools.pairwise(job.migrations()):
        assert record["ended_s"] is not None, f"{record['migration_id']} never ended, {after['migration_id']} came later"


def test_a_rank_lost_with_its_buddy_makes_the_result_approximate_and_the_record_says_so(losing: LongJob, job: Job) -> None:
    """Rank 2 keeps the small state of rank 1; rank 3 keeps that of rank 2."""
    losing.power_off(1, 2)
    losing.replaced(1, 2)
    job.wait_progress()
    (line,) = job.record()["approximations"]
    assert "rank 1" in line
    assert "lost together with its buddy" in line
    shown = losing.cluster.tmctl("job", "show", job.id).output
    assert "lost together with its buddy" in " ".join(shown.split())
    losing.end()
