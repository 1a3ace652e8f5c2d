"""Standby nodes from a reservation that jobs share, with jobs of an ordinary user: taken by expansion or by a companion job when
ranks must move, taken anew when they were used, given back, and not lost with the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import WORLD_SIZE, assert_unharmed, until
from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.pool import PoolStack, enrol, members, reserve, unreserve
from tests.slurm.report import Report
from tests.slurm.stack import SlurmJob, SlurmStack, stopped
from tests.slurm.users import ALICE

POOL = ("n9", "n10")


@pytest.fixture
def pool(stack: SlurmStack, job_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., PoolStack]]:
    """Starts a daemon that knows of the reservation, with further keys of [slurm]."""
    enrol(job_cluster)
    stacks: list[PoolStack] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TMD_SLURM_HINT_SOCKET")  # the other daemon's
        patch.setenv("XDG_CACHE_HOME", str(job_cluster.places.shared / "cache"))

        def start(**slurm: str) -> PoolStack:
            for name, value in {"standby_reservation": "standby", **slurm}.items():
                patch.setenv(f"TMD_SLURM_{name.upper()}", value)
            stacks.append(PoolStack(job_cluster, tmp_path))
            stacks[-1].__enter__()
            return stacks[-1]

        yield start
        for each in stacks:
            each.__exit__(None, None, None)
    running = job_cluster.run("squeue", "-h", "-o", "%i").stdout.split()
    if running:
        job_cluster.run("scancel", *running, check=False)
    unreserve(job_cluster)


def origin(job: SlurmJob, node: str) -> str:
    """Where the ledger says that it came from."""
    return str(job.use_of(node)["origin"])


def test_what_was_used_is_taken_anew_so_that_a_second_drain_finds_a_standby(
    pool: Callable[..., PoolStack], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    """The first drain uses the job's own standby; its place is taken by a node of the pool, which the second drain uses."""
    reserve(job_cluster, *POOL)
    job = pool().training("1")
    job.wait_ready(1)
    own = job.allocation()
    assert own.isdisjoint(POOL)
    _, first = job.rank_off_the_batch_host()
    job.drain(first)
    job.wait_move(first)
    job.wait_given_back(first)
    (standby,) = job.wait_ready(1)
    refill = standby["record"]["node"]
    assert refill in POOL
    rank, second = job.rank_off_the_batch_host()
    job.drain(second)
    record = job.wait_move(second)
    assert job.node_of(rank) == refill
    job.finish()
    assert_unharmed(job, reference)
    job.cluster.returned(*POOL)
    report.add("drain after a refill from the pool", [record])


def test_ranks_move_into_the_pool_by_a_companion_job_and_either_job_may_be_cancelled(
    pool: Callable[..., PoolStack], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    reserve(job_cluster, *POOL)
    job = pool(growth="companion").training("1:pool")
    rank, node = job.rank_off_the_batch_host()
    job.drain(node)
    record = job.wait_move(node)
    job.wait_given_back(node)
    job_cluster.wait_state(node, "IDLE+DRAIN")
    taken = job.node_of(rank)
    ((companion, held),) = members(job_cluster).items()
    assert held == taken
    assert origin(job, taken) == f"reservation standby, by companion job {companion}"

    job_cluster.run("scancel", companion, user=ALICE)
    until(lambda: rank_is_elsewhere(job, rank, taken), f"rank {rank} is replaced: {job.view()['sentence']}")
    until(lambda: companion not in members(job_cluster), f"companion {companion} has ended")
    job.wait_progress()
    assert_unharmed(job, reference, lines_lost={rank: 1})
    report.add("move into the pool by a companion job, which is cancelled then", [record])
    job.cancel()
    job.cluster.returned(*POOL)


def rank_is_elsewhere(job: SlurmJob, rank: int, node: str) -> bool:
    holder = {each["record"]["rank"]: each["record"]["node"] for each in job.view()["ranks"]}
    return job.view()["record"]["state"] == "running" and holder.get(rank, node) != node


def test_a_daemon_killed_in_the_middle_of_a_growth_loses_no_node(
    pool: Callable[..., PoolStack], job_cluster: SlurmCluster, reference: SlurmJob
) -> None:
    """1. The order is given to an agent that is stopped. 2. slurmctld is stopped; the agent goes on and asks it. 3. The daemon
    dies. 4. slurmctld goes on, and the agent takes the node. 5. The next daemon finds it in the job."""
    reserve(job_cluster, *POOL)
    stack = pool()
    job = stack.training("1:pool")
    rank, node = job.rank_off_the_batch_host()
    agent = job.agent_pid(job.batch_host())
    with contextlib.ExitStack() as silent:
        with stopped(agent):
            job.drain(node)
            until(
                lambda: "is being taken from reservation" in job.node_sentence(node),
                f"a node is taken: {job.node_sentence(node)}",
            )
            silent.enter_context(stopped(job_cluster.part_pid(SLURMCTLD)))
        until(lambda: asks_slurm(agent), "the agent asks Slurm")
        stack.stack.kill()
    until(lambda: not job.allocation().isdisjoint(POOL), "the job has the node, with no daemon there")
    stack.stack.start()
    job.wait_move(node)
    taken = job.node_of(rank)
    assert taken in POOL
    assert len([each for each in POOL if each in job.allocation()]) == 1, "no second one was taken"
    until(lambda: origin(job, taken) == "reservation standby, by expansion", "the node is on record")
    job.finish()
    assert_unharmed(job, reference)
    stack.returned(*POOL)


def asks_slurm(agent: int) -> bool:
    return any(child.name() == "scontrol" for child in psutil.Process(agent).children())


def test_who_waits_for_the_pool_sees_why_and_moves_by_expansion_once_it_has_a_node(
    pool: Callable[..., PoolStack], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    """No reservation; one for others; one that is all in use; then a free node. A job in it whose patron is gone is ended."""

    def told(what: str) -> None:
        until(lambda: what in job.node_sentence(node), f"{what!r} is told of {node}: {job.node_sentence(node)}", every_s=0.1)

    job = pool().training("1:pool")
    rank, node = job.rank_off_the_batch_host()
    job.drain(node)
    told("there is no reservation standby")
    reserve(job_cluster, *POOL, who="Users=root")
    told(f"reservation standby is not for {ALICE}, only for root")
    unreserve(job_cluster)
    reserve(job_cluster, POOL[0])
    place = ("--reservation=standby", f"--nodelist={POOL[0]}", "--exclusive", "--output=/dev/null")
    tenant = job_cluster.sbatch("sleep 1000", *place, user=ALICE)
    told("reservation standby has no free node (1 in all)")
    job.wait_progress()
    job_cluster.run("scancel", tenant)
    orphan = job_cluster.sbatch("sleep 1000", *place, "--comment=tmd:companion=4000000", user=ALICE)
    record = job.wait_move(node)
    assert orphan not in members(job_cluster)
    assert job.node_of(rank) == POOL[0]
    job.wait_given_back(node)
    job_cluster.wait_state(node, "IDLE+DRAIN")
    assert len(job.allocation()) == WORLD_SIZE
    assert origin(job, POOL[0]) == "reservation standby, by expansion"
    job.finish()
    assert_unharmed(job, reference)
    job.cluster.returned(POOL[0])
    report.add("move into the pool by expansion", [record])
