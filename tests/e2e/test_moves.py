"""Planned moves of one job, one after the other: what moves, what stays as it is, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import sockets
from tests.e2e.cluster import WORLD_SIZE, Cluster, Job, assert_unharmed, until
from tests.e2e.conftest import REFERENCE_STEPS
from tests.e2e.losses_rig import IDLE_PACE_MS
from tmd.core.records import PHASES


@pytest.fixture(scope="module")
def job(cluster: Cluster, reference: Job) -> Iterator[Job]:
    """Ranks 0 to 3 on n1 to n4, standbys on n5 and n6. The tests of this module move it on, in their order."""
    job = cluster.start_job(standby=2, steps=REFERENCE_STEPS)
    job.wait_ready(2)
    yield job
    job.end()


def assert_moved(job: Job, record: dict[str, Any], ranks: list[int]) -> None:
    """The record of a move is complete, its leavers have left in good order, and their nodes are given back."""
    assert (record["kind"], record["state"]) == ("planned", "done")
    assert sorted(map(int, record["leavers"])) == ranks
    assert list(record["phases_s"]) == list(PHASES)
    assert all(seconds >= 0 for seconds in record["phases_s"].values())
    assert record["downtime_s"] >= 0
    assert (record["stayer_links_reopened"], record["steps_redone"], record["record_origin"]) == (0, 0, "exact")
    assert record["bytes_moved"] == sum(job.rank(rank)["counters"]["state_bytes"] for rank in ranks) > 0
    counted = {rank["record"]["rank"] for rank in job.view()["ranks"] if "stayer_links_reopened" in rank["counters"]}
    assert counted >= set(range(WORLD_SIZE)) - set(ranks), "every stayer has counted its links to the others"
    for rank in ranks:
        assert job.rank(rank)["record"]["incarnation"] == record["joiners"][str(rank)]
        assert job.node_of(rank) in record["to_nodes"]
    for node in record["from_nodes"]:
        agent = until(lambda node=node: _ended_agent(job, node), f"the agent of {node} has ended")
        assert agent["exit_code"] == 0
        log = (job.out / "logs" / f"{node}.log").read_text()
        assert "ended with code" not in log
        assert "was killed" not in log
        assert job.use_of(node)["use"] == "released"


def _ended_agent(job: Job, node: str) -> dict[str, Any] | None:
    (agent,) = [agent for agent in job.agents() if agent["node"] == node][-1:]
    return None if agent["running"] else agent


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (["--rank", "9"], "has no rank 9: it has ranks 0 to 3"),
        (["--node", "n99"], "has no node n99"),
        (["--node", "n5"], "no rank of job {job} lives on n5 (it is standby)"),
        (["--rank", "1", "--to", "n2"], "n2 is where the rank is now: name another node"),
        (["--rank", "1", "--to", "n3"], "n3 has no standby of job {job}: name a standby node"),
        (["--rank", "1", "--to", "n8"], "has no node n8"),
    ],
)
def test_a_move_that_cannot_be_is_refused_in_words(cluster: Cluster, job: Job, request_: list[str], said: str) -> None:
    assert said.format(job=job.id) in cluster.refusal("migrate", job.id, *request_)
    assert job.migrations() == []


def test_a_dry_run_says_what_would_be_done_and_does_nothing(cluster: Cluster, job: Job) -> None:
    told = cluster.ask("migrate", job.id, "--rank", "2", "--dry-run")["explanation"]
    assert told.startswith("rank 2 would move from n3 to n")
    assert job.migrations() == []


def test_a_move_opens_links_to_the_joiner_and_touches_no_other(cluster: Cluster, job: Job) -> None:
    before = job.pids()
    stayers = {before[rank] for rank in (0, 2, 3)}
    kept = sockets.between(stayers)
    all_before = set().union(*map(sockets.connections, stayers))
    listening = {pid: sockets.listeners(pid) for pid in stayers}
    assert len({each.pid for each in kept}) == 3, "the stayers are linked to one another"

    result = cluster.tmctl("migrate", job.id, "--node", "n2", "--wait", "--json")
    assert result.exit_code == 0, result.output
    record = job.wait_measured(json.loads(result.stdout)["record"]["migration_id"])
    assert_moved(job, record, [1])
    for phase in PHASES:
        assert phase in result.stderr

    after = job.pids()
    assert {after[rank] for rank in (0, 2, 3)} == stayers
    assert sockets.between(stayers) == kept
    assert {pid: sockets.listeners(pid) for pid in stayers} == listening
    opened = set().union(*map(sockets.connections, stayers)) - all_before
    ends = {(each.local, each.remote) for each in sockets.connections(after[1])}
    assert opened
    assert {(each.remote, each.local) for each in opened} <= ends, "a link was opened that does not lead to the joiner"
    assert cluster.node("n2")["manager_state"] == "IDLE"


def test_the_story_of_a_move_tells_causes_before_effects(cluster: Cluster, job: Job) -> None:
    (record,) = job.migrations()
    story = job.story(record["migration_id"])
    seen: set[int] = set()
    for event in story:
        assert event["cause"] in (0, *seen), f"{event} comes before its cause"
        seen.add(event["event_id"])
    about = [event["kind"] for event in story if event["subject"] == record["migration_id"]]
    assert about == ["requested", "planned", "prepared", "armed", "flipped", "done"]
    ends = job.story(record["leavers"]["1"])[-1], job.story("n2")[-1]
    assert [event["kind"] for event in ends] == ["retired", "released"]
    assert all(f"migration {record['migration_id']}" in event["text"] for event in ends)
    shown = cluster.tmctl("story", record["migration_id"]).output
    assert "operator" in shown
    assert "flipped: the leavers are frozen" in " ".join(shown.split())


def test_a_second_move_of_the_same_job(job: Job) -> None:
    (standby,) = (each["node"] for each in job.view()["nodes"] if each["use"] == "standby")
    assert_moved(job, job.wait_measured(job.request("--rank", "3", "--to", standby)), [3])
    assert job.node_of(3) == standby
    assert [record["state"] for record in job.migrations()] == ["done", "done"]
    assert job.record()["epoch"] == 2


def test_without_a_standby_a_move_is_refused_and_a_drained_node_keeps_its_rank(cluster: Cluster, job: Job) -> None:
    refusal = cluster.refusal("migrate", job.id, "--rank", "0")
    assert "1 standby needed, 0 usable" in refusal
    assert f"start tmd-run of job {job.id} on another node" in refusal
    cluster.ask("drain", "n1", "--reason", "fan 2 is slow")
    until(lambda: "1 rank stays until there are as many standbys (0 usable)" in job.node_sentence("n1"), "n1 says why")
    job.wait_progress()
    assert job.node_of(0) == "n1"


def test_of_two_drained_nodes_one_gets_the_only_standby_and_the_other_waits(cluster: Cluster, job: Job) -> None:
    """n1 is drained already and waits for a standby; n3 is drained too, then a node comes back, later another."""
    job.set_pace(IDLE_PACE_MS)
    cluster.ask("drain", "n3", "--reason", "this rack is emptied")
    cluster.reboot("n2")
    first = until(lambda: job.migrations()[2:], "a migration begins")[0]
    assert first["trigger"].startswith(f"drain of {first['from_nodes'][0]}: ")
    assert_moved(job, job.wait_measured(first["migration_id"]), [0 if first["from_nodes"] == ["n1"] else 2])
    (waiting,) = {"n1", "n3"} - set(first["from_nodes"])
    assert "1 rank stays until there are as many standbys (0 usable)" in job.node_sentence(waiting)
    assert cluster.node(first["from_nodes"][0])["manager_state"] == "IDLE+DRAIN"

    before = {record["migration_id"] for record in job.migrations()}
    cluster.reboot("n4")
    (second,) = until(
        lambda: [record for record in job.migrations() if record["migration_id"] not in before], "the other migration begins"
    )
    assert second["from_nodes"] == [waiting]
    assert_moved(job, job.wait_measured(second["migration_id"]), [0 if waiting == "n1" else 2])
    assert cluster.node(waiting)["manager_state"] == "IDLE+DRAIN"
    assert "fan 2 is slow" in cluster.node("n1")["reason"]
    for node in ("n1", "n3"):
        cluster.ask("resume", node)


def test_the_moved_job_ends_as_if_nothing_had_happened(cluster: Cluster, job: Job, reference: Job) -> None:
    job.set_pace(0)
    job.wait_state("done", within_s=120.0)
    job.wait_gone()
    assert_unharmed(job, reference)
    assert len(job.results()) == len(reference.results())
    cost = cluster.ask("job", "cost", job.id)
    assert (len(cost["migrations"]), cost["unmeasured"], cost["total"]["steps_redone"]) == (4, 0, 0)
    moved = sum(record["bytes_moved"] for record in job.migrations())
    tensors = cost["total"]["bytes_by_transport"]["tcp"]
    assert 0 < tensors < moved, "the manifest and the small state go beside the tensors"
    assert sum(cost["total"]["bytes_by_source"].values()) == tensors
    assert "in all" in cluster.tmctl("job", "cost", job.id).output
    assert {agent["exit_code"] for agent in job.agents()} <= {0, -9}, "n2 and n4 lost power once, all others ended well"
    assert f"job {job.id} has ended (done" in cluster.refusal("migrate", job.id, "--rank", "0")
