"""Takes a node of a reservation for the job that this agent serves, as its user: into the job itself, or by a companion job.

Contract: returns once the node is had. What does not come to that leaves nothing behind: a job that was made on the way is ended.
Should that not be possible any more, the daemon finds it by its comment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import shlex
import tempfile
from collections.abc import Mapping

from tmd.protocol.agent import NodeOrder
from tmd_worker.agent.commands import CommandFailed, run
from tmd_worker.agent.slurm import COMPANION_OF, SlurmStep

#: Slurm has so long to find the node free, less than a command may take.
GRANT_TIMEOUT_S = 20
#: A companion job runs after this long, or is given up.
START_TIMEOUT_S = 45.0
START_POLL_S = 0.25
#: To end what was begun in vain; the agent itself may be leaving.
END_TIMEOUT_S = 5.0
_GRANTED = re.compile(r"Granted job allocation (\d+)")
#: Variables that are of the job which the agent is in, or options of Slurm's commands.
_OF_A_JOB = ("SLURM_", "SALLOC_", "SBATCH_", "SRUN_", "SPANK_", "_SLURM_SPANK_")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What a node must be given so that it is like the job's others, in the words of Slurm's options."""

    options: tuple[str, ...]
    #: Where its output goes; empty: nowhere.
    output: str

    @classmethod
    def read(cls, printed: str) -> JobShape:
        """Of what `scontrol show job` prints. Its owner may have written some of that, and harms nobody else."""

        def value(key: str) -> str:
            found = re.search(rf"(?:^|\s){key}=(\S+)", printed)
            return found[1] if found and found[1] not in ("(null)", "N/A") else ""

        options = [f"--{name}={value(key)}" for name, key in _SHAPE if value(key)]
        devices = [part.removeprefix("gres:") for part in value("TresPerNode").split(",") if part.startswith("gres:")]
        options += [f"--gres={','.join(devices)}"] if devices else []
        found = re.search(r"^\s*StdOut=(.+)$", printed, re.MULTILINE)
        return cls(options=tuple(options), output=found[1].replace("%", "%%") if found else "")


_SHAPE = (("partition", "Partition"), ("account", "Account"), ("qos", "QOS"))


async def take(step: SlurmStep, order: NodeOrder, environment: Mapping[str, str]) -> None:
    """Raises CommandFailed, OSError."""
    printed, _ = await run(["scontrol", "show", "job", step.named])
    shape = JobShape.read(printed)
    (node,) = order.nodes
    own = outside(environment)
    if order.kind == "expand":
        await _expand(step, node, order.reservation, shape, own)
    else:
        await _accompany(step, node, order.reservation, shape, own)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a command that belongs to no job, but to the same cluster."""
    return {name: text for name, text in environment.items() if name == "SLURM_CONF" or not name.startswith(_OF_A_JOB)}


# -------------------------------------------------------------------- into the job


def expander(step: SlurmStep, node: str, reservation: str, shape: JobShape) -> list[str]:
    """Asks for a job that can be merged into this one. Devices and time are the other's, by Slurm's own rule."""
    tasks = [f"--cpus-per-task={step.cpus_per_task}"] if step.cpus_per_task else []
    return [
        *("salloc", "--no-shell", "--nodes=1", f"--nodelist={node}", "--ntasks-per-node=1", *tasks, "--exclusive", "--mem=0"),
        *(f"--immediate={GRANT_TIMEOUT_S}", f"--reservation={reservation}", f"--dependency=expand:{step.named}"),
        *(f"--job-name=tmd-grow-{step.life}", f"--comment=tmd:expander={step.life}"),
        *shape.options,
    ]


async def _expand(step: SlurmStep, node: str, reservation: str, shape: JobShape, environment: Mapping[str, str]) -> None:
    if any(option.startswith("--gres=") for option in shape.options):
        raise CommandFailed('the job has devices, and Slurm cannot merge such jobs: set growth = "companion" in [slurm]')
    _, said = await run(expander(step, node, reservation, shape), environment=environment)
    granted = _GRANTED.search(said)
    if granted is None:
        raise CommandFailed(f"salloc has named no job: {' '.join(said.split())}")
    with tempfile.TemporaryDirectory(prefix="tmd-run-") as folder:  # scontrol leaves scripts of its own there
        try:
            await run(["scontrol", "update", f"jobid={granted[1]}", "NumNodes=0"], cwd=folder)
        except BaseException:
            await _end(granted[1])
            raise


# -------------------------------------------------------------------- beside it


def companion(step: SlurmStep, node: str, reservation: str, shape: JobShape, time_left: str) -> list[str]:
    """Submits a job whose script, read from standard input, is an agent of this job; it lasts as long as that agent."""
    return [
        *("sbatch", "--parsable", "--nodes=1", f"--nodelist={node}", "--ntasks-per-node=1", "--exclusive", "--mem=0"),
        *(f"--reservation={reservation}", "--no-requeue", f"--time={time_left}", f"--chdir={step.cwd}", "--open-mode=append"),
        *(f"--job-name=tmd-standby-{step.life}", f"--comment=tmd:companion={step.life}"),
        *(f"--output={shape.output or '/dev/null'}", "--export=ALL", *shape.options),
    ]


def companion_script(step: SlurmStep) -> str:
    return f"#!/bin/sh\nexec {shlex.join(step.run_agent())}\n"


async def _accompany(step: SlurmStep, node: str, reservation: str, shape: JobShape, environment: Mapping[str, str]) -> None:
    left, _ = await run(["squeue", "--noheader", f"--jobs={step.job_id}", "--format=%L"])
    command = companion(step, node, reservation, shape, left.split()[0] if left.split() else "UNLIMITED")
    variables = step.environment(environment) | {COMPANION_OF: step.life}
    printed, _ = await run(command, environment=variables, script=companion_script(step))
    job_id = printed.strip().partition(";")[0]
    try:
        await _wait_until_it_runs(job_id)
    except BaseException:
        await _end(job_id)
        raise


async def _wait_until_it_runs(job_id: str) -> None:
    """Raises CommandFailed."""
    state = reason = "PENDING"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while state in ("PENDING", "CONFIGURING"):
                await asyncio.sleep(START_POLL_S)
                printed, _ = await run(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r"])
                state, _, reason = printed.strip().partition("|")
    if state in ("PENDING", "CONFIGURING"):
        raise CommandFailed(f"companion job {job_id} has not started in {START_TIMEOUT_S:g} s: Slurm says {reason}")
    if state != "RUNNING":
        raise CommandFailed(f"companion job {job_id} has ended at once: Slurm calls it {state or 'unknown'}, {reason}")


async def _end(job_id: str) -> None:
    """As far as that is possible now."""
    with contextlib.suppress(CommandFailed, OSError):
        await run(["scancel", job_id], timeout_s=END_TIMEOUT_S)
