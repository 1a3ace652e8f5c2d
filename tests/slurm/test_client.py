"""The contract of tmd.nodes.slurm.client on real daemons: what is asked is answered as it is, and silence is never good news."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.slurm.clients import opened_client
from tests.slurm.cluster import MUNGED, SLURMCTLD, SLURMDBD, SlurmCluster
from tests.slurm.files import Options
from tests.slurm.users import ALICE, BOB, user
from tmd.nodes.base import QueryFailed, RequestRefused, UnknownJob, UnknownNode
from tmd.nodes.slurm.client import SlurmClient

#: A job whose step outlives the loss of a node.
STEADY = "srun --no-kill --kill-on-bad-exit=0 --wait=0 sleep 1000"
GRACE_S = 120
PREEMPTION = f"""
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=scavenge Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_S} State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""


@pytest.fixture
async def client(cluster: SlurmCluster) -> AsyncIterator[SlurmClient]:
    async with opened_client(cluster) as opened:
        yield opened


def running(cluster: SlurmCluster, *options: str, name: str = ALICE, script: str = STEADY) -> str:
    """A job that runs, with its step."""
    job = cluster.sbatch(script, "--no-kill", *options, user=name)
    nodes = lambda: [node for node in cluster.options.node_names if len(cluster.processes_of(node)) > 1]  # noqa: E731
    wanted = next((int(option[2:]) for option in options if option.startswith("-N")), 1)
    cluster.wait_for(lambda: len(nodes()) >= wanted, f"job {job} to run")
    return job


async def test_nodes(client: SlurmClient) -> None:
    nodes = {node.name: node for node in await client.nodes()}
    assert {name: (node.state, node.address) for name, node in nodes.items()} == {
        "n1": ("IDLE", "127.0.0.11"),
        "n2": ("IDLE", "127.0.0.12"),
        "n3": ("IDLE", "127.0.0.13"),
        "n4": ("IDLE", "127.0.0.14"),
    }
    assert (await client.node("n2")).name == "n2"
    booted_s = nodes["n1"].boot_s
    assert booted_s is not None
    assert 0 < booted_s < time.time()


@pytest.mark.parametrize("name", ["n9", "n[1-2]", "n1,n2", "ALL", "", "n1 state=down", "-n1"])
async def test_only_the_name_of_one_node_is_a_node(client: SlurmClient, cluster: SlurmCluster, name: str) -> None:
    for ask in (client.node(name), client.set_drain(name, "x"), client.set_resume(name)):
        with pytest.raises(UnknownNode):
            await ask
    assert set(cluster.states().values()) == {"IDLE"}


async def test_a_drain_with_its_reason_on_an_idle_node_and_on_a_busy_one(client: SlurmClient, cluster: SlurmCluster) -> None:
    running(cluster, "-N1", "-wn1")
    reason = "bad \"DIMM\", slot=3 [a@b] 'x'"
    for name, state in (("n1", "MIXED+DRAIN"), ("n2", "IDLE+DRAIN")):
        await client.set_drain(name, reason)
        node = await client.node(name)
        assert (node.state, node.reason, node.reason_user) == (state, reason, "root")
        assert node.reason_s is not None
        assert abs(node.reason_s - time.time()) < 60
    await client.set_resume("n2")
    cluster.wait_state("n2", "IDLE")
    assert (await client.node("n2")).reason == ""


async def test_a_reason_of_two_lines_is_one(client: SlurmClient) -> None:
    await client.set_drain("n1", "first\nNodeName=n2 State=DOWN\x00")
    assert (await client.node("n1")).reason == "first NodeName=n2 State=DOWN"
    assert (await client.node("n2")).state == "IDLE"


async def test_what_is_not_drained_is_not_resumed(client: SlurmClient) -> None:
    with pytest.raises(RequestRefused, match="Invalid node state"):
        await client.set_resume("n1")


async def test_a_job_its_owner_its_nodes_and_what_is_noted_of_it(client: SlurmClient, cluster: SlurmCluster) -> None:
    comment = "tmd:standby=1 | two\nlines of text"
    job_id = running(cluster, "-N2", "-wn[2-3]", "-t10", f"--comment={comment}", "--job-name=x UserId=root(0) NodeList=n4")
    cluster.run("scontrol", "update", f"jobid={job_id}", "admincomment=tmd:standby=1;nodes=2 x=y")
    job = await client.job(job_id)
    assert (job.job_id, job.state, job.uid, job.user) == (job_id, "RUNNING", user(ALICE).uid, ALICE)
    assert (job.nodes, job.held_nodes, job.batch_host, job.restart_count) == (("n2", "n3"), ("n2", "n3"), "n2", 0)
    assert job.admin_comment == "tmd:standby=1;nodes=2 x=y"
    assert job.end_s is not None
    assert 500 < job.end_s - time.time() < 601
    assert await client.comment(job_id) == comment
    assert job in await client.jobs()
    cluster.run("scancel", job_id)
    cluster.settle()
    assert (await client.job(job_id)).held_nodes == ()
    assert await client.jobs() == []


async def test_a_job_that_was_requeued_is_another_life_of_it(client: SlurmClient, cluster: SlurmCluster) -> None:
    job_id = running(cluster, "--requeue", "-N1")
    cluster.run("scontrol", "requeue", job_id)
    cluster.wait_for(lambda: cluster.run("squeue", "-h", "-j", job_id, "-o", "%T").stdout == "PENDING\n", "the job to wait again")
    job = await client.job(job_id)
    assert (job.state, job.restart_count, job.held_nodes, job.end_s) == ("PENDING", 1, (), None)


async def test_a_job_that_is_held_after_its_requeue_has_not_ended(client: SlurmClient, cluster: SlurmCluster) -> None:
    job_id = running(cluster, "--requeue", "-N1")
    cluster.run("scontrol", "requeuehold", "State=SpecialExit", job_id)
    listed = ("squeue", "-h", "-j", job_id, "-o", "%T")
    cluster.wait_for(lambda: cluster.run(*listed).stdout == "SPECIAL_EXIT\n", "the job to be held")
    assert [(job.job_id, job.state, job.held_nodes) for job in await client.jobs()] == [(job_id, "SPECIAL_EXIT", ())]


async def test_a_job_without_a_script_or_a_limit_has_no_batch_host_and_no_end(client: SlurmClient, cluster: SlurmCluster) -> None:
    said = cluster.run("salloc", "--no-shell", "-N1", "-wn2", user=ALICE).stderr
    job = await client.job(said.partition("Granted job allocation ")[2].split()[0])
    assert (job.nodes, job.batch_host, job.end_s, job.preempted_s) == (("n2",), "", None, None)
    cluster.run("scontrol", "suspend", job.job_id)
    assert [(job.state, job.end_s) for job in await client.jobs()] == [("SUSPENDED", None)]


async def test_a_preempted_job_and_the_end_of_its_grace_time(make_cluster: Callable[[Options], SlurmCluster]) -> None:
    preempting = make_cluster(Options(nodes=1, slurm_conf=PREEMPTION))
    async with opened_client(preempting) as client:
        victim = running(preempting, "-N1", "-t30", "--partition=scavenge", script="trap '' TERM; sleep 1000")
        assert (await client.job(victim)).preempted_s is None
        preempting.sbatch(STEADY, "-N1", "--exclusive", "--partition=urgent", user=ALICE)
        async with asyncio.timeout(60):
            while (job := await client.job(victim)).preempted_s is None:
                await asyncio.sleep(0.2)
    assert job.end_s is not None
    assert abs(job.preempted_s - time.time()) < 60
    assert abs(job.end_s - job.preempted_s - GRACE_S) < 5


async def test_a_task_of_an_array_is_a_job(client: SlurmClient, cluster: SlurmCluster) -> None:
    array = running(cluster, "--array=1-2%1", "-N1", name=BOB)
    jobs = {job.job_id: job for job in await client.jobs()}
    (task,) = [job for job in jobs.values() if job.state == "RUNNING"]
    assert (await client.job(task.job_id)).held_nodes == task.held_nodes != ()
    assert (await client.job(array)).uid == user(BOB).uid


@pytest.mark.parametrize("job_id", ["4000", "", "all", "1,2", "-1", "local-1"])
async def test_a_job_that_nobody_knows(client: SlurmClient, job_id: str) -> None:
    for ask in (client.job(job_id), client.comment(job_id), client.set_job_nodes(job_id, ("n1",))):
        with pytest.raises(UnknownJob):
            await ask


async def test_a_job_gives_a_node_away_and_what_ran_there_is_killed(client: SlurmClient, cluster: SlurmCluster) -> None:
    job_id = running(cluster, "-N3", "-wn[1-3]")
    assert len(cluster.processes_of("n3")) > 1
    await client.set_drain("n3", "to be replaced")
    await client.set_job_nodes(job_id, ("n1", "n2"))
    cluster.wait_state("n3", "IDLE+DRAIN")
    cluster.wait_for(lambda: len(cluster.processes_of("n3")) == 1, "the rank on n3 to be gone")
    job = await client.job(job_id)
    assert (job.state, job.nodes) == ("RUNNING", ("n1", "n2"))
    assert len(cluster.processes_of("n2")) > 1
    assert not list(cluster.places.shared.glob("slurm_job_*")), "no scripts are left where somebody works"


async def test_what_slurm_does_not_allow_is_refused_in_its_words(client: SlurmClient, cluster: SlurmCluster) -> None:
    job_id = running(cluster, "-N2", "-wn[1-2]")
    for nodes in (("n2",), ("n1", "n4")):
        with pytest.raises(RequestRefused, match="Invalid node name specified"):
            await client.set_job_nodes(job_id, nodes)
    assert (await client.job(job_id)).nodes == ("n1", "n2")


async def test_reservations(client: SlurmClient, cluster: SlurmCluster) -> None:
    assert await client.reservations() == []
    flags = ("starttime=now+2hours", "duration=60", "nodes=n[3-4]", "flags=maint,ignore_jobs", f"users=root,{ALICE}")
    cluster.run("scontrol", "create", "reservation", "reservationname=spare", *flags)
    try:
        (found,) = await client.reservations()
    finally:
        cluster.run("scontrol", "delete", "reservationname=spare")
    assert (found.name, found.nodes, set(found.users), found.state) == ("spare", ("n3", "n4"), {"root", ALICE}, "INACTIVE")
    assert {"MAINT", "IGNORE_JOBS"} <= set(found.flags)
    assert abs(found.start_s - time.time() - 7200) < 120
    assert found.end_s - found.start_s == 3600
    assert found.is_maintenance


async def test_a_reservation_that_is_always_as_far_ahead_announces_nothing(client: SlurmClient, cluster: SlurmCluster) -> None:
    flags = ("starttime=now+2hours", "duration=60", "nodes=n4", "flags=maint,time_float", "accounts=root")
    cluster.run("scontrol", "create", "reservation", "reservationname=spare", *flags)
    try:
        (found,) = await client.reservations()
    finally:
        cluster.run("scontrol", "delete", "reservationname=spare")
    assert {"MAINT", "TIME_FLOAT"} <= set(found.flags)
    assert not found.is_maintenance
    assert (found.users, found.accounts) == ((), ("root",))


async def test_a_job_in_a_reservation(client: SlurmClient, cluster: SlurmCluster) -> None:
    flags = ("starttime=now", "duration=60", "nodes=n4", f"users={ALICE}")
    cluster.run("scontrol", "create", "reservation", "reservationname=fans", *flags)
    try:
        job = await client.job(running(cluster, "-N1", "--reservation=fans"))
        (found,) = await client.reservations()
    finally:
        # Not by `settle`: a node of a reservation that has begun is never just IDLE.
        cluster.run("scancel", "--user", ALICE)
        cluster.wait_for(lambda: not cluster.run("squeue", "-h").stdout, "the job to end")
        cluster.run("scontrol", "delete", "reservationname=fans")
    assert (job.reservation, job.nodes, found.state) == ("fans", ("n4",), "ACTIVE")


@pytest.mark.parametrize("part", [SLURMCTLD, MUNGED])
async def test_silence_is_unknown_within_the_deadline_and_over_once_it_is_over(cluster: SlurmCluster, part: str) -> None:
    """By itself scontrol waits for munged for most of a minute."""
    async with opened_client(cluster, query_timeout_s=1.0, change_timeout_s=1.0) as client:
        cluster.stop_part(part, signal.SIGKILL)
        asked_s = time.monotonic()
        for ask in (client.nodes(), client.node("n1"), client.jobs(), client.job("1"), client.set_drain("n1", "x")):
            with pytest.raises(QueryFailed):
                await ask
        assert time.monotonic() - asked_s < 15
        cluster.start_part(part)
        assert len(await client.nodes()) == 4


async def test_a_frozen_slurmctld_does_not_stop_anything_else(cluster: SlurmCluster) -> None:
    async with opened_client(cluster, query_timeout_s=1.0) as client:
        cluster.signal_part(SLURMCTLD, signal.SIGSTOP)
        try:
            question = asyncio.create_task(client.nodes())
            turns = 0
            while not question.done():
                await asyncio.sleep(0.01)
                turns += 1
            with pytest.raises(QueryFailed, match="no answer in 1 s"):
                question.result()
            assert turns > 20, "the event loop has turned meanwhile"
        finally:
            cluster.signal_part(SLURMCTLD, signal.SIGCONT)
        assert len(await client.nodes()) == 4


async def test_without_its_database_slurm_still_answers(client: SlurmClient, cluster: SlurmCluster) -> None:
    cluster.stop_part(SLURMDBD, signal.SIGKILL)
    assert len(await client.nodes()) == 4
    await client.set_drain("n1", "without a database")
    assert (await client.node("n1")).state == "IDLE+DRAIN"


async def test_a_cancelled_question_leaves_no_process(cluster: SlurmCluster) -> None:
    async with opened_client(cluster) as client:
        cluster.signal_part(SLURMCTLD, signal.SIGSTOP)
        try:
            question = asyncio.create_task(client.nodes())
            await asyncio.sleep(0.2)
            question.cancel()
            with pytest.raises(asyncio.CancelledError):
                await question
        finally:
            cluster.signal_part(SLURMCTLD, signal.SIGCONT)
        assert len(await client.nodes()) == 4
