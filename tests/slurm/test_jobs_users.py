"""Jobs of ordinary users under a daemon that is neither root nor Slurm's user, heard over TCP by munge: what tmd does in a job it
does as that job's user, and nobody else can have it done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.cluster import ROOT, assert_unharmed, until
from tests.slurm.cluster import MUNGED, SlurmCluster
from tests.slurm.head import Head, opened_head
from tests.slurm.report import Report
from tests.slurm.stack import STEPS, SlurmJob, SlurmStack, stopped
from tests.slurm.users import ALICE, BOB, DAEMON, user

#: What NVIDIA's driver writes about a GPU that is gone.
XID = "3,1,99000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
#: Jobs that outlive the start of others, and some tmctl.
SLOW_PACE_MS = 300


@pytest.fixture(scope="module")
def shared_head(job_cluster: SlurmCluster, job_stack: SlurmStack) -> Iterator[Head]:
    """`job_stack` has set the environment of everything."""
    with opened_head(job_cluster) as head:
        yield head


@pytest.fixture
def head(shared_head: Head, reference: SlurmJob) -> Head:
    shared_head.settle()
    return shared_head


@contextlib.contextmanager
def unwell(head: Head, node: str) -> Iterator[None]:
    """Slurm has tmd-health run on every node each second, and on this one the kernel's log tells of a lost GPU. On the others it
    does nothing, since each of them would start an interpreter."""
    slurm = head.slurm
    places = slurm.places.shared / "health"
    for name, content in {"dev/kmsg": XID, "proc/uptime": "100.0 1.0"}.items():
        (places / name).parent.mkdir(parents=True)
        (places / name).write_text(content)
    settings = {**head.environment(), "PYTHONPATH": os.environ["PYTHONPATH"], "TMD_HEALTH_OPTIONS": str(places / "options")}
    (places / "options").write_text(f"--root {places} --disk /\n")
    program = places / "tmd-health"
    exports = "".join(f"export {name}={value}\n" for name, value in settings.items())
    runs = f"exec {head.python} -m tmd_worker.health.main"
    program.write_text(f"#!/bin/sh\n[ $SLURMD_NODENAME = {node} ] || exit 0\n{exports}{runs}\n")
    program.chmod(0o755)
    before = slurm.options.slurm_conf
    slurm.reconfigure(f"{before}\nHealthCheckProgram={program}\nHealthCheckInterval=1")
    try:
        yield
    finally:
        slurm.reconfigure(before)


def uid_of(pid: int) -> int:
    return psutil.Process(pid).uids().real


def test_jobs_of_two_users(head: Head, reference: SlurmJob, report: Report) -> None:
    """
    1. Jobs of two users train on nodes of their own.
    2. slurmd runs tmd-health on a node of alice's, which finds a GPU that is gone: the daemon drains the node, her rank moves.
    3. Another one is killed: she has a standby for that, too, and what was started for it is hers.
    4. Bob can neither see her job nor have anything done in it. His own has not noticed anything.
    """
    bob = head.sbatch(steps=STEPS, pace_ms=SLOW_PACE_MS, user=BOB, options=("--exclusive",))
    bob.wait_state("running")
    alice = head.started(standby=2, user=ALICE, options=("--exclusive",))
    alice.set_pace(SLOW_PACE_MS)
    assert uid_of(head.stack.pid()) == user(DAEMON).uid
    _, drained = alice.rank_off_the_batch_host()
    with unwell(head, drained):
        planned = alice.wait_move(drained)
        alice.wait_given_back(drained)
        head.slurm.wait_state(drained, "IDLE+DRAIN")
    assert "Reason=tmd-health: gpu.xid 0000:3b:00 fatal" in head.slurm.run("scontrol", "-o", "show", "node", drained).stdout
    smaller = f"_slurm_rpc_update_job: complete JobId={alice.id} uid={user(ALICE).uid} "
    assert smaller in (head.slurm.places.log / "slurmctld.log").read_text()
    rank, killed = alice.rank_off_the_batch_host()
    head.slurm.kill_node(killed)
    until(lambda: alice.moves_off(killed), f"rank {rank} is replaced: {alice.view()['sentence']}")
    unplanned = alice.wait_measured(alice.moves_off(killed)[0]["migration_id"])
    assert (planned["kind"], unplanned["kind"]) == ("planned", "unplanned")
    assert {uid_of(pid) for pid in alice.processes()} == {user(ALICE).uid}
    _nothing_for_bob(head, alice)
    assert bob.migrations() == []
    for job in (alice, bob):
        job.finish()
    assert_unharmed(alice, reference, lines_lost={rank: 1})
    assert_unharmed(bob, reference)
    assert_owned_by(alice, ALICE)
    assert_owned_by(bob, BOB)
    report.add("jobs of two users under a daemon of its own user", [planned, unplanned])


def _nothing_for_bob(head: Head, alice: SlurmJob) -> None:
    assert alice.id not in head.tmctl_as(BOB, "jobs")[1].split()
    for request in (("job", "show", alice.id), ("job", "cancel", alice.id), ("migrate", alice.id, "--rank", "0")):
        code, said = head.tmctl_as(BOB, *request)
        assert (code, "not yours" in said) == (1, True), said
    place = ("--job-id", alice.id, "--node", "n1", "--nnodes", "4")
    agent = head.python_as(BOB, "-m", "tmd_worker.agent", *place, str(ROOT / "tests" / "e2e" / "train_small.py"))
    assert agent.returncode == 3
    assert f"belongs to uid {user(ALICE).uid}" in agent.stderr
    for command in (("scancel", alice.id), ("srun", f"--jobid={alice.id}", "--overlap", "true")):
        assert head.slurm.run(*command, user=BOB, check=False).returncode != 0
    assert head.tmctl_as(ALICE, "job", "show", alice.id)[0] == 0
    assert alice.record()["state"] == "running"


def assert_owned_by(job: SlurmJob, who: str) -> None:
    """What the job has written."""
    written = [path for path in job.out.iterdir() if path.name in ("output", "srun.code") or path.suffix == ".jsonl"]
    assert len(written) == 6
    assert {path.owner() for path in written} == {who}


def test_munge_is_down_in_the_middle_of_a_move(head: Head, reference: SlurmJob, report: Report) -> None:
    """
    1. A node is drained; before the flip munged ends: from here Slurm answers nobody, and no new agent can prove itself.
    2. The ranks move and train on. The node cannot be given back, and the operator hears why.
    3. munged is back: the node is given back.
    """
    job = head.started(standby=1, user=ALICE)
    _, node = job.rank_off_the_batch_host()
    with stopped(job.wait_ready(1)[0]["pid"]):
        job.drain(node)
        until(lambda: job.migrations(), f"a move off {node} begins")
        head.slurm.stop_part(MUNGED)
    record = job.wait_move(node)
    job.wait_progress()
    until(lambda: "munge" in job.node_sentence(node).lower(), f"the operator is told of munge: {job.node_sentence(node)}")
    assert node not in {job.node_of(rank) for rank in range(4)}
    head.slurm.start_part(MUNGED)
    job.wait_given_back(node)
    head.slurm.wait_state(node, "IDLE+DRAIN")
    job.finish()
    assert_unharmed(job, reference)
    assert job.srun_code() == 0
    report.add("munge down in the middle of a move", [record])


def test_a_drain_moves_one_task_of_an_array(head: Head, reference: SlurmJob, report: Report) -> None:
    """Each task is a job of its own; scancel of one leaves the other."""
    shared = head.slurm.places.shared
    tasks = [head.prepared(shared / f"array{task}", STEPS, 400) for task in (0, 1)]
    script = f"srun {head.command(f'{shared}/array$SLURM_ARRAY_TASK_ID', STEPS)}"
    asked = ("-N4", "--ntasks-per-node=1", "--standby=1", "--array=0-1", "--exclusive", f"--output={shared}/array%a/output")
    array = head.slurm.sbatch(script, *asked, user=ALICE, env=head.environment())
    for number, task in enumerate(tasks):
        task.listed_as = f"{array}_{number}"
        task.id = until(lambda task=task: job_of_task(head, task), f"task {number} runs", every_s=0.2)
        until(lambda task=task: head.stack.job(task.id), f"the daemon knows {task.id}: {task.logs()}", every_s=0.1)
    for task in tasks:
        task.wait_ready(1)
    moved, other = tasks
    _, node = moved.rank_off_the_batch_host()
    moved.drain(node)
    record = moved.wait_move(node)
    moved.wait_given_back(node)
    head.slurm.wait_state(node, "IDLE+DRAIN")
    assert other.migrations() == []
    assert len(other.allocation()) == 5
    head.slurm.run("scancel", f"{array}_1", user=ALICE)
    until(lambda: other.record()["state"] == "failed", "tmd knows that the task has ended")
    other.wait_gone()
    moved.finish()
    assert_unharmed(moved, reference)
    until(lambda: set(head.slurm.states().values()) == {"IDLE", "IDLE+DRAIN"}, "no node is held any more")
    report.add("drain of a node of one task of an array", [record])


def job_of_task(head: Head, task: SlurmJob) -> str:
    """Slurm's id of a task that runs; empty before."""
    return head.slurm.run("squeue", "-h", "-j", task.listed_as, "-t", "running", "-o", "%A", check=False).stdout.strip()
