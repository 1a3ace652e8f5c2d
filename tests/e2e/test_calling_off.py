"""Planned moves that are queued, held back, asked for twice or called off: training never notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import DEADLINE_S, Cluster, Job, until
from tests.e2e.losses_rig import LongJob


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    with Cluster(tmp_path_factory.mktemp("off"), nodes=6) as cluster:
        yield LongJob(cluster, reference)


@pytest.fixture
def job(steady: LongJob) -> Iterator[Job]:
    """Whole and running; after the test it has lost no process, no step and no standby that no move has used up."""
    job = steady.whole()
    epoch, pids = job.record()["epoch"], job.pids()
    yield job
    job.faults.disarm()
    steady.cluster.ask("unpause")
    moved = {int(rank) for record in job.migrations() if record["state"] == "done" for rank in record["leavers"]}
    job.wait_progress()
    steady.assert_unharmed()
    assert {rank: pid for rank, pid in job.pids().items() if rank not in moved} == {
        rank: pid for rank, pid in pids.items() if rank not in moved
    }
    if not moved:
        assert job.record()["epoch"] == epoch


def told_off(job: Job, migration_id: str) -> dict[str, Any]:
    """The record of a migration that was called off, whose joiners are standbys again."""
    record = job.wait_migration(migration_id, "aborted")
    for incarnation in record["joiners"].values():
        until(lambda i=incarnation: i in {s["record"]["incarnation"] for s in job.wait_ready(2)}, f"{incarnation} stands by")
    return record


def test_a_pause_holds_requests_and_drains_back(steady: LongJob, job: Job) -> None:
    """Paused: one move is asked for, one node is drained; both wait. The drain is taken back, the other is called off."""
    tmd = steady.cluster
    tmd.ask("pause")
    asked = job.request("--rank", "1")
    until(lambda: job.migration_sentence(asked) == "queued: tmd is paused", f"{asked} waits")
    node = job.node_of(2)
    tmd.ask("drain", node, "--reason", "fan 2 is slow")
    drained = until(lambda: job.migrations()[1:], "the drain makes a migration")[0]
    assert drained["trigger"].startswith(f"drain of {node}: fan 2 is slow")
    until(lambda: job.migration_sentence(drained["migration_id"]) == f"queued behind {asked}", "it waits, too")
    assert "paused" in tmd.tmctl("status").output
    tmd.ask("resume", node)
    assert job.wait_migration(drained["migration_id"], "aborted")["reason"] == f"{node} is up again"
    answer = tmd.ask("migration", "abort", asked)["record"]
    assert (answer["state"], answer["reason"]) == ("aborted", "called off by root")
    tmd.ask("unpause")
    assert "has ended already (aborted" in tmd.refusal("migration", "abort", asked)


def test_of_two_requests_at_once_for_the_same_rank_one_is_granted(steady: LongJob, job: Job) -> None:
    tmd = steady.cluster
    tmd.ask("pause")
    command = [
        sys.executable,
        "-m",
        "tmd.cli.main",
        "--socket",
        str(tmd.stack.socket),
        "migrate",
        job.id,
        "--rank",
        "3",
        "--json",
    ]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [(*each.communicate(timeout=DEADLINE_S), each.returncode) for each in both]
    (refused,) = [stderr for _, stderr, code in answers if code == 1]
    (granted,) = [json.loads(stdout)["migration_id"] for stdout, _, code in answers if code == 0]
    assert f"rank 3 is already moving in migration {granted} (queued)" in refused
    tmd.ask("migration", "abort", granted)
    tmd.ask("unpause")


def test_a_move_under_way_refuses_a_second_one_and_can_be_called_off(steady: LongJob, job: Job) -> None:
    """1. The joiner of rank 1 has staged its links and is held there. 2. Everybody wants something. 3. An operator ends it."""
    tmd = steady.cluster
    fault = job.faults.arm("stop", "staged", 1)
    first = job.request("--rank", "1")
    joiner = fault.stopped_pid()
    assert job.migration(first)["state"] == "installing"
    assert f"rank 1 is already moving in migration {first} (installing)" in tmd.refusal("migrate", job.id, "--rank", "1")
    assert f"already moving in migration {first}" in tmd.refusal("migrate", job.id, "--node", job.node_of(1))
    second = job.request("--rank", "3")
    assert job.migration_sentence(second) == f"queued behind {first}"
    assert "1 standby needed, 0 usable" in tmd.refusal("migrate", job.id, "--rank", "0")
    tmd.ask("migration", "abort", second)
    tmd.ask("migration", "abort", first)
    os.kill(joiner, signal.SIGCONT)
    assert told_off(job, first)["reason"] == "called off by root"
    assert told_off(job, second)["reason"] == "called off by root"


def test_a_drain_that_is_taken_back_before_the_flip(steady: LongJob, job: Job) -> None:
    node = job.node_of(2)
    fault = job.faults.arm("stop", "staged", 2)
    steady.cluster.ask("drain", node, "--reason", "wrong node")
    joiner = fault.stopped_pid()
    steady.cluster.ask("resume", node)
    (record,) = [each for each in job.migrations() if each["trigger"].startswith(f"drain of {node}: wrong node")]
    os.kill(joiner, signal.SIGCONT)
    assert told_off(job, record["migration_id"])["reason"] == f"{node} is up again"
    assert steady.cluster.node(node)["manager_state"] == "ALLOCATED"


def test_a_drain_whose_move_an_operator_calls_off_leaves_its_ranks_alone(steady: LongJob, job: Job) -> None:
    node = job.node_of(0)
    fault = job.faults.arm("stop", "staged", 0)
    steady.cluster.ask("drain", node, "--reason", "this rack is emptied")
    joiner = fault.stopped_pid()
    (record,) = [each for each in job.migrations() if each["trigger"].startswith(f"drain of {node}: this rack")]
    steady.cluster.ask("migration", "abort", record["migration_id"])
    os.kill(joiner, signal.SIGCONT)
    told_off(job, record["migration_id"])
    until(lambda: "an operator called its migration off, so its ranks stay" in job.node_sentence(node), f"{node} says why")
    job.wait_progress()
    assert job.node_of(0) == node
    steady.cluster.ask("resume", node)


def test_after_the_flip_it_is_too_late_to_call_it_off(steady: LongJob, job: Job) -> None:
    fault = job.faults.arm("stop", "state.loading", 3)
    migration_id = job.request("--rank", "3")
    joiner = fault.stopped_pid()
    until(lambda: job.migration(migration_id)["state"] == "copying", f"{migration_id} has flipped")
    assert "has flipped: it is too late to call it off" in steady.cluster.refusal("migration", "abort", migration_id)
    os.kill(joiner, signal.SIGCONT)
    job.wait_migration(migration_id, "done")


def test_what_a_pause_held_back_happens_once_it_ends(steady: LongJob, job: Job) -> None:
    steady.cluster.ask("pause")
    migration_id = job.request("--rank", "0")
    until(lambda: job.migration_sentence(migration_id) == "queued: tmd is paused", f"{migration_id} waits")
    steady.cluster.ask("unpause")
    record = job.wait_measured(migration_id)
    assert record["stayer_links_reopened"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["migrate", "nowhere", "--rank", "0"], "there is no job nowhere"),
        (["migration", "abort", "m0"], "there is no migration m0"),
        (["drain", "n99", "--reason", "fan"], "no node n99"),
    ],
)
def test_what_does_not_exist_is_named(steady: LongJob, arguments: list[str], said: str) -> None:
    assert said in steady.cluster.refusal(*arguments)
