"""The Slurm commands with which an agent acts for its job, as text: nothing is run here.

Contract: a started agent runs the same command in the same directory and environment as the one that starts it, less what belongs
to that one's node, task or step; Slurm gives it its own. The step outlives its srun, and no other step notices its end.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence

#: Tells an agent that it was started by another one, so its step's numbers say nothing about its place in the job.
LAUNCHED = "TMD_LAUNCHED"
#: Tells an agent that its own Slurm job is but a companion of the one that it serves, which is named here as tmd does.
COMPANION_OF = "TMD_COMPANION_OF"
#: Variables of one step, task or node: a new step has its own, and srun would take some of them for options.
_OF_A_STEP = ("SLURM_STEP", "SLURM_SRUN_", "SLURM_LAUNCH_", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_TASK", "SLURM_TOPOLOGY_")
_OF_ANOTHER_LAUNCHER = ("PMI_", "PMIX_", "OMPI_", "SLURM_PMI")
_OF_A_NODE = frozenset(
    {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}
    | {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURMD_NODENAME", "SLURM_NTASKS_PER_NODE"}
    | {"SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_GPUS", "SLURM_EXPORT_ENV"}
    | {"TMD_NODE", "TMD_NODE_INDEX", "TMD_HOST", "TMD_LABELS"}
)
#: Kinds of binding that mean the same on every node; masks and maps are of one.
_BINDINGS = frozenset({"none", "rank", "sockets", "cores", "threads", "ldoms", "boards"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """What an agent must know of its own step to start others like it."""

    job_id: str
    #: As scontrol names the job: a task of an array by array and number, since the array's own id means all of them.
    named: str
    #: As tmd names it: with the number of its life behind a dot if it was requeued.
    life: str = ""
    #: The commands that take further nodes are to be had.
    grows: bool = False
    #: The agent's command, as the kernel would take it.
    command: tuple[str, ...]
    cwd: str
    #: Nodes that train.
    nnodes: int
    #: Options for srun that only the user knows, of a container for example.
    srun_options: tuple[str, ...] = ()
    #: Of this agent's own step, where the same is meant on every node.
    cpus_per_task: str = ""
    binding: str = ""

    def launch(self, node: str) -> list[str]:
        """The command that starts an agent on this node of the job and lasts as long as that does."""
        return self.run_agent(f"--jobid={self.job_id}", f"--nodelist={node}", "--overlap")

    def run_agent(self, *place: str) -> list[str]:
        """The command that starts an agent: in its caller's allocation, unless `place` names another."""
        own = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        own += [f"--cpu-bind={self.binding}"] if self.binding else []
        return [
            *("srun", *place, "--nodes=1", "--ntasks=1"),
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL", f"--chdir={self.cwd}"),
            *own,
            *self.srun_options,
            *self.command,
        ]

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Of an agent that is started by one with `environment`."""
        kept = {name: value for name, value in environment.items() if name not in _OF_A_NODE}
        kept = {name: value for name, value in kept.items() if not name.startswith((*_OF_A_STEP, *_OF_ANOTHER_LAUNCHER))}
        return kept | {LAUNCHED: "1", "TMD_NNODES": str(self.nnodes)}

    def query(self) -> list[str]:
        """Prints a line `job|nodes|batch host` for each job that the id may mean."""
        return ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%A|%N|%B"]

    def answer(self, printed: str) -> tuple[str, str]:
        """Of what the query printed: the job's nodes as Slurm writes them, and its batch host. Raises LookupError."""
        for line in printed.splitlines():
            job_id, _, rest = line.strip().partition("|")
            nodes, _, batch_host = rest.partition("|")
            if job_id == self.job_id and nodes:
                return nodes, batch_host
        raise LookupError(f"squeue does not list job {self.job_id}")

    @staticmethod
    def expand(nodes: str) -> list[str]:
        """Prints the names that `nodes` stands for, one on each line."""
        return ["scontrol", "show", "hostnames", nodes]

    def shrink(self, keep: Collection[str]) -> list[str]:
        """Leaves the job these nodes alone; what still runs on the others is killed. Writes files where it is run."""
        return ["scontrol", "update", f"jobid={self.named}", f"NodeList={','.join(keep)}"]


def life(environment: Mapping[str, str]) -> str:
    """The job that a process serves, as tmd names it: a requeued job starts from its own beginning. Empty outside Slurm."""
    if COMPANION_OF in environment:
        return environment[COMPANION_OF]
    job_id, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT", "0")
    return job_id if restarts == "0" else f"{job_id}.{restarts}"


def own_step(environment: Mapping[str, str], nnodes: int, srun_options: str = "", argv: Sequence[str] = ()) -> SlurmStep | None:
    """The step that this process is part of; None outside Slurm, or where its commands are not to be had, as in most containers,
    or if its job is a companion, whose agents leave orders to those of the job itself.

    `argv`: the process's command, by default that of this one. Raises ValueError if `srun_options` is not shell.
    """
    job_id = environment.get("SLURM_JOB_ID")
    path = environment.get("PATH")
    if (
        job_id is None
        or COMPANION_OF in environment
        or any(shutil.which(program, path=path) is None for program in ("srun", "scontrol", "squeue"))
    ):
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    binding = environment.get("SLURM_CPU_BIND_TYPE", "").rstrip(":")
    return SlurmStep(
        job_id=job_id,
        named=f"{array}_{task}" if array and task else job_id,
        life=life(environment),
        grows=all(shutil.which(program, path=path) is not None for program in ("salloc", "sbatch", "scancel")),
        command=tuple(argv) or (sys.executable, *sys.orig_argv[1:]),
        cwd=os.getcwd(),
        nnodes=nnodes,
        srun_options=tuple(shlex.split(srun_options)),
        cpus_per_task=environment.get("SLURM_CPUS_PER_TASK", ""),
        binding=binding if binding in _BINDINGS else "",
    )
