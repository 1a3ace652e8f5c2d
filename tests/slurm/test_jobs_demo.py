"""The demo (`make demo`) as a job of Slurm: its own script, one standby, and a daemon and a user without any of root's rights."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.cluster import ROOT, WORLD_SIZE, until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.head import Head
from tests.slurm.pool import POOL, reserve, returned
from tests.slurm.report import Report
from tests.slurm.users import ALICE
from tmd.demo.losses import compare, read_run

STEPS = 80
SMALL = (str(ROOT / "examples" / "gpt" / "train.py"), "--width=64", "--layers=2")
#: The job outlives two replacements, and the start of a standby between them.
PACED = "--step-floor-ms=900"


def test_a_job_with_one_standby_outlives_a_drained_and_then_a_killed_node(
    pool: Callable[..., Head], job_cluster: SlurmCluster, report: Report
) -> None:
    """
    1. A node is drained: its rank moves to the job's only standby, and Slurm has the node back.
    2. A node of the pool takes the standby's place.
    3. slurmd, stepd and the rank of another node are killed: the pool's node takes that role.
    4. Losses and final state are those of a run that nothing happened to, bit by bit.
    """
    reserve(job_cluster, *POOL)
    head = pool()
    undisturbed = head.sbatch(steps=STEPS, user=ALICE, training=SMALL)
    undisturbed.wait_state("done")
    undisturbed.wait_gone()

    job = head.sbatch(standby=1, steps=STEPS, user=ALICE, training=(*SMALL, PACED))
    job.wait_ready(1)
    assert job.allocation().isdisjoint(POOL)
    moved, drained = job.rank_off_the_batch_host()
    planned, latency_ms, release_ms = job.timed_drain(drained)
    assert planned["kind"] == "planned"
    assert job.node_of(moved) != drained
    assert drained not in job.allocation()
    assert "bad DIMM" in job_cluster.run("scontrol", "show", "node", drained).stdout

    (standby,) = job.wait_ready(1)
    refill = standby["record"]["node"]
    assert refill in POOL
    lost, killed = job.rank_off_the_batch_host(but=moved)
    job_cluster.kill_node(killed)
    replaced = until(lambda: job.moves_off(killed), f"rank {lost} is replaced: {job.view()['sentence']}")
    unplanned = job.wait_measured(replaced[0]["migration_id"])
    assert unplanned["kind"] == "unplanned"
    assert job.node_of(lost) == refill

    job.finish()
    runs = [read_run(each.out, WORLD_SIZE) for each in (undisturbed, job)]
    verdict = compare(*runs, killed_ranks={lost}, kills=1)
    assert verdict.differences == ()
    assert job.record()["approximations"] == []
    returned(job_cluster, *POOL)
    report.add("demo job: drain of a node", [planned], event_latency_ms=latency_ms, node_release_ms=release_ms)
    report.add("demo job: kill of slurmd, stepd and rank of another node, after a refill from the pool", [unplanned])
