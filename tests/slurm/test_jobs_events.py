"""What Slurm and its administrators do to nodes and jobs besides draining (docs/slurm.md has a table), on real daemons."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import assert_unharmed, until
from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.report import Report
from tests.slurm.stack import IDLE_PACE_MS, SlurmJob, SlurmStack

#: A slurmd that does not answer is flagged within 25 s, and called DOWN only after 60.
SLURM_CONF = """
SlurmdTimeout=60
MessageTimeout=5
RebootProgram={reboot}
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=100000
SuspendTimeout=1
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=scavenge Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=20 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""


@pytest.fixture(scope="module")
def rebooted(job_cluster: SlurmCluster) -> Iterator[Path]:
    """Slurm has a program that reboots a node, which only makes this file; others that switch it off and on, which do nothing;
    and partitions one of which takes nodes from the other's jobs."""
    seen = job_cluster.places.shared / "rebooted"
    program = job_cluster.places.shared / "reboot.sh"
    program.write_text(f"#!/bin/sh\ntouch {seen}\n")
    program.chmod(0o755)
    before = job_cluster.options.slurm_conf
    job_cluster.settle()
    try:
        job_cluster.reconfigure(before + SLURM_CONF.format(reboot=program))
        job_cluster.restart(SLURMCTLD, signal.SIGKILL)
        yield seen
    finally:
        job_cluster.settle()
        job_cluster.reconfigure(before)
        job_cluster.restart(SLURMCTLD, signal.SIGKILL)


@contextlib.contextmanager
def silent_slurmd(slurm: SlurmCluster, node: str) -> Iterator[None]:
    """It is stopped, its steps go on."""
    slurm.signal_part(node, signal.SIGSTOP)
    try:
        yield
    finally:
        slurm.signal_part(node, signal.SIGCONT)


@contextlib.contextmanager
def lost_datagrams(path: Path) -> Iterator[None]:
    """Nobody hears what the plugin in slurmctld sends."""
    aside = path.with_suffix(".aside")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


@contextlib.contextmanager
def reserved_for_maintenance(slurm: SlurmCluster, node: str, *, in_s: int) -> Iterator[None]:
    """However many jobs run there."""
    when = (f"starttime=now+{in_s}", "duration=10", f"nodes={node}")
    slurm.run("scontrol", "create", "reservation=fans", *when, "users=root", "flags=maint,ignore_jobs")
    try:
        yield
    finally:
        slurm.run("scontrol", "delete", "reservation=fans")


def update(slurm: SlurmCluster, node: str, **values: str) -> None:
    slurm.run("scontrol", "update", f"nodename={node}", *(f"{key}={value}" for key, value in values.items()))


def test_what_an_administrator_does_to_nodes_moves_the_ranks_and_costs_the_job_nothing(
    stack: SlurmStack, reference: SlurmJob, rebooted: Path, plugin_folder: Path, report: Report
) -> None:
    """One job, one thing after the other:

    1. The slurmd of a node is silent: Slurm says NOT_RESPONDING, and nobody moves, as its agent speaks.
    2. state=fail, while the plugin's datagrams get lost.
    3. A maintenance reservation that begins in a minute.
    4. scontrol reboot ASAP nextstate=resume: the node reboots once the ranks have left.
    5. state=power_down: the node is switched off once the ranks have left, and on again after the job.
    6. state=down.
    """
    slurm = stack.slurm
    job = stack.started(standby=5)
    job.set_pace(IDLE_PACE_MS)
    _, silent = job.rank_off_the_batch_host()
    with silent_slurmd(slurm, silent):
        until(lambda: "NOT_RESPONDING" in slurm.states()[silent], f"{silent} is NOT_RESPONDING", every_s=0.2)
        job.wait_progress()
        assert job.use_of(silent)["state"] == "up"
    assert job.migrations() == []

    _, node = job.rank_off_the_batch_host()
    with lost_datagrams(plugin_folder / "hints.sock"):
        update(slurm, node, state="fail", reason="fan 2")
        failed = job.wait_move(node)
    job.wait_given_back(node)
    slurm.wait_state(node, "IDLE+FAIL")
    assert "Reason=fan 2 [" in slurm.run("scontrol", "-o", "show", "node", node).stdout

    _, node = job.rank_off_the_batch_host()
    with reserved_for_maintenance(slurm, node, in_s=60):
        maintained = job.wait_move(node)
        job.wait_given_back(node)
        assert maintained["trigger"].startswith(f"drain of {node}: maintenance reservation fans from ")

    _, node = job.rank_off_the_batch_host()
    slurm.run("scontrol", "reboot", "ASAP", "nextstate=resume", "reason=new kernel", node)
    booted = job.wait_move(node)
    until(rebooted.exists, f"{node} reboots: {slurm.states()}")
    assert "REBOOT_ISSUED" in slurm.states()[node]
    assert node not in job.allocation()

    _, off = job.rank_off_the_batch_host()
    update(slurm, off, state="power_down", reason="too hot")
    cooled = job.wait_move(off)
    job.wait_given_back(off)
    until(lambda: "POWER" in slurm.states()[off], f"{off} is switched off: {slurm.states()}")

    rank, node = job.rank_off_the_batch_host()
    update(slurm, node, state="down", reason="smoke")
    moved = until(lambda: job.moves_off(node), f"rank {rank} leaves {node}: {job.node_sentence(node)}")
    downed = job.wait_measured(moved[0]["migration_id"])
    assert downed["kind"] == "unplanned", "Slurm kills what a job has on a node that is called DOWN"
    assert "Reason=smoke [" in slurm.run("scontrol", "-o", "show", "node", node).stdout
    job.finish()
    assert_unharmed(job, reference, lines_lost={rank: 1})
    assert job.record()["approximations"] == []
    slurm.wait_state(off, "IDLE+POWERED_DOWN")
    update(slurm, off, state="power_up")
    until(lambda: "POWERING_UP" in slurm.states()[off], f"{off} is switched on: {slurm.states()}")
    slurm.boot(off)
    slurm.wait_state(off, "IDLE")
    moves = {"state=fail, datagrams lost": failed, "maintenance": maintained, "reboot": booted, "state=power_down": cooled}
    assert {record["kind"] for record in moves.values()} == {"planned"}
    for name, record in {**moves, "state=down": downed}.items():
        report.add(name, [record])


def test_a_preempted_job_ends_tidily_and_its_story_says_why(stack: SlurmStack, rebooted: Path, report: Report) -> None:
    """The urgent job gets every node: nothing of the other one is left on any."""
    job = stack.started(standby=1, options=("--partition=scavenge",))
    job.set_pace(IDLE_PACE_MS)
    urgent = stack.slurm.sbatch("srun sleep 1", "--partition=urgent", f"--nodes={stack.slurm.options.nodes}", "--exclusive")
    record = job.wait_state("failed")["record"]
    assert record["reason"].startswith("it was preempted: ")
    job.wait_gone()
    assert job.kinds(job.id).count("preempted") == 1
    assert not [move for move in job.migrations() if move["kind"] == "planned" or move["state"] != "failed"]
    waits = ("squeue", "-h", "-j", urgent, "-o", "%T")
    until(lambda: not stack.slurm.run(*waits, check=False).stdout, f"job {urgent} has run", every_s=0.2)
    report.add("preemption", [], bit_identical=None)
