"""Jobs by sbatch whose nodes an administrator drains: ranks move, losses and state stay what they are, Slurm gets the node."""

from __future__ import annotations

from tests.e2e.cluster import WORLD_SIZE, assert_unharmed, until
from tests.slurm.report import Report
from tests.slurm.stack import SlurmJob, SlurmStack, stopped

#: A move has begun so soon after the order to drain; the command that gives it takes some tens of them.
EVENT_LATENCY_MS = 200
#: The leaver's node is IDLE+DRAIN so soon after the first step without it.
NODE_RELEASE_MS = 1000


def test_three_moves_in_a_row(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    """How long a drain may be on its way to tmd, and how long Slurm may wait for the node, is promised. The best of the three is
    held against it: a machine that is busy with something else makes any one of them late, and a slow tmd all of them."""
    job = stack.started(standby=3)
    figures = [job.timed_drain(job.rank_off_the_batch_host()[1]) for _ in range(3)]
    assert len(job.allocation()) == WORLD_SIZE
    job.finish()
    assert_unharmed(job, reference)
    assert job.srun_code() == 0, "whoever left did so by itself"
    moves, latencies_ms, releases_ms = zip(*figures, strict=True)
    assert min(latencies_ms) < EVENT_LATENCY_MS, f"from drains to tmd: {latencies_ms} ms"
    assert min(releases_ms) < NODE_RELEASE_MS, f"from first steps to nodes that are IDLE+DRAIN: {releases_ms} ms"
    report.add("three moves in a row", list(moves), event_latency_ms=max(latencies_ms), node_release_ms=max(releases_ms))


def test_two_jobs_move_at_once(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    jobs = stack.several_started(2, standby=1)
    nodes = [job.rank_off_the_batch_host()[1] for job in jobs]
    stack.slurm.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", "reason=this rack is emptied")
    moves = [job.wait_move(node) for job, node in zip(jobs, nodes, strict=True)]
    for job, node in zip(jobs, nodes, strict=True):
        job.wait_given_back(node)
        job.set_pace(0)
    for job in jobs:
        job.finish()
        assert_unharmed(job, reference)
    report.add("two jobs at once", moves)


def test_a_drained_standby_is_given_back_and_the_job_goes_on_without(
    stack: SlurmStack, reference: SlurmJob, report: Report
) -> None:
    job = stack.started(standby=1)
    (standby,) = job.wait_ready(1)
    node = standby["record"]["node"]
    job.drain(node)
    stack.slurm.wait_state(node, "IDLE+DRAIN")
    job.wait_given_back(node)
    assert job.migrations() == []
    job.finish()
    assert_unharmed(job, reference)
    assert job.srun_code() == 0
    report.add("drain of a standby", [])


def test_four_drains_and_one_standby(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    """One moves; the others stay where they are, and the operator sees why."""
    job = stack.started(standby=1)
    nodes = [job.node_of(rank) for rank in range(WORLD_SIZE)]
    stack.slurm.run("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", "reason=this rack is emptied")
    moved = until(lambda: [move for move in job.migrations() if move["state"] == "done"], "one node is emptied")
    stay = [node for node in nodes if node not in moved[0]["from_nodes"]]
    for node in stay:
        sentence = until(
            lambda node=node: (told := job.node_sentence(node)).endswith("usable)") and told, f"the operator is told of {node}"
        )
        assert "stays until there are as many standbys (0 usable)" in sentence
    job.wait_progress()
    assert {job.node_of(rank) for rank in range(WORLD_SIZE)} >= set(stay)
    states = stack.slurm.states()
    assert all("DRAIN" in states[node] for node in nodes), "nobody's drain is undone"
    job.finish()
    assert_unharmed(job, reference)
    report.add("drain of four nodes with one standby", moved)


def test_the_batch_host_is_emptied_and_stays(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    job = stack.started(standby=1)
    node = job.batch_host()
    job.drain(node)
    record = job.wait_move(node)
    assert node not in {job.node_of(rank) for rank in range(WORLD_SIZE)}
    sentence = until(lambda: (told := job.node_sentence(node)).startswith("no rank") and told, f"the operator is told of {node}")
    assert "the batch script runs there" in sentence
    assert "Not safe: reboot" in sentence
    job.wait_progress()
    assert node in job.allocation()
    job.finish()
    assert_unharmed(job, reference)
    assert job.srun_code() == 0
    report.add("drain of the batch host", [record])


def test_a_drain_that_is_taken_back_before_the_flip_is_none(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    job = stack.started(standby=1)
    rank, node = job.rank_off_the_batch_host()
    standby = job.wait_ready(1)[0]["pid"]
    with stopped(standby):  # so that it does not flip
        job.drain(node)
        open_move = until(lambda: [move for move in job.migrations() if move["state"] != "done"], f"a move off {node} begins")
        stack.slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
        job.wait_migration(open_move[0]["migration_id"], "aborted")
    assert job.node_of(rank) == node
    assert node in job.allocation()
    job.finish()
    assert_unharmed(job, reference)
    report.add("drain taken back before the flip", [])
