"""Standby nodes from a reservation that jobs share, with jobs of an ordinary user and a daemon of its own user: taken by
expansion or by a companion job when ranks must move, given back, and not lost with the daemon. test_jobs_demo.py has a refill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from tests.e2e.cluster import WORLD_SIZE, assert_unharmed, until
from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.head import Head
from tests.slurm.pool import POOL, members, reserve, returned, training, unreserve
from tests.slurm.report import Report
from tests.slurm.stack import SlurmJob, stopped
from tests.slurm.users import ALICE


def origin(job: SlurmJob, node: str) -> str:
    """Where the ledger says that it came from."""
    return str(job.use_of(node)["origin"])


def test_ranks_move_into_the_pool_by_a_companion_job_and_either_job_may_be_cancelled(
    pool: Callable[..., Head], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    reserve(job_cluster, *POOL)
    job = training(pool(growth="companion"), "1:pool")
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
    returned(job_cluster, *POOL)


def rank_is_elsewhere(job: SlurmJob, rank: int, node: str) -> bool:
    holder = {each["record"]["rank"]: each["record"]["node"] for each in job.view()["ranks"]}
    return job.view()["record"]["state"] == "running" and holder.get(rank, node) != node


def test_a_daemon_killed_in_the_middle_of_a_growth_loses_no_node(
    pool: Callable[..., Head], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    """1. The order is given to an agent that is stopped. 2. slurmctld is stopped; the agent goes on and asks it. 3. The daemon
    dies. 4. slurmctld goes on, and the agent takes the node. 5. The next daemon finds it in the job."""
    reserve(job_cluster, *POOL)
    head = pool()
    job = training(head, "1:pool")
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
        head.stack.kill()
    until(lambda: not job.allocation().isdisjoint(POOL), "the job has the node, with no daemon there")
    head.stack.start()
    record = job.wait_move(node)
    taken = job.node_of(rank)
    assert taken in POOL
    assert len([each for each in POOL if each in job.allocation()]) == 1, "no second one was taken"
    until(lambda: origin(job, taken) == "reservation standby, by expansion", "the node is on record")
    job.finish()
    assert_unharmed(job, reference)
    returned(job_cluster, *POOL)
    report.add("tmd killed -9 while a node of the pool is taken", [record])


def asks_slurm(agent: int) -> bool:
    return any(child.name() == "scontrol" for child in psutil.Process(agent).children())


def test_who_waits_for_the_pool_sees_why_and_moves_by_expansion_once_it_has_a_node(
    pool: Callable[..., Head], job_cluster: SlurmCluster, reference: SlurmJob, report: Report
) -> None:
    """No reservation; one for others; one that is all in use; then a free node. A job in it whose patron is gone is ended."""

    def told(what: str) -> None:
        until(lambda: what in job.node_sentence(node), f"{what!r} is told of {node}: {job.node_sentence(node)}", every_s=0.1)

    job = training(pool(), "1:pool")
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
    returned(job_cluster, POOL[0])
    report.add("move into the pool by expansion", [record])
