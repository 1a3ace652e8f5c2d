"""tmd on a real Slurm cluster: the daemon as a process of its own, jobs by sbatch, and what tests/e2e knows of a job."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.e2e.cluster import ROOT, TRAIN, WORLD_SIZE, Cluster, Job, is_stopped, until
from tests.slurm.cluster import SlurmCluster
from tmd.cli.client import Client, ClientError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
#: Slow enough that a job outlives what a test does to it, fast enough to be done with soon.
PACE_MS = 100
#: While replacements start: no step is lost to waiting.
IDLE_PACE_MS = 400
#: As many as the reference has, and as every job here.
STEPS = 400
#: Of the folders of jobs: stacks share a cluster.
NUMBERS = itertools.count(1)


class Daemon:
    """`tmd serve` for this cluster. Use as a context manager; `kill` and `start` give it another life.

    `user`: as whom it runs, None: as root. `settings`: variables for it alone.
    """

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *,
        user: str | None = None,
        settings: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self._folder = folder
        self._python = python
        self._identity: Any = slurm.identity(user, settings)
        self._sockets = tempfile.TemporaryDirectory(prefix="tmd-slurm-sock-")
        if user is not None:
            shutil.chown(self._sockets.name, user)
        self.socket = Path(self._sockets.name) / "tmd.sock"
        self.client = Client(str(self.socket))
        self.log = folder / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def start(self) -> None:
        """Returns once it answers."""
        places = ["--state-dir", str(self._folder / "state"), "--socket", str(self.socket)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._python), "-m", "tmd.daemon.main", "serve", *places, "--resource-manager", "slurm"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._identity,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(ClientError):
                self.client.get("/v1/health")
                return
            time.sleep(0.05)
        raise AssertionError(f"the daemon did not start:\n{self.log.read_text()}")

    def revive(self) -> None:
        """Starts it again if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self.start()

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def job(self, job_id: str) -> dict[str, Any] | None:
        """JobView as JSON; None as long as the daemon knows no such job."""
        try:
            view: dict[str, Any] = self.client.get(f"/v1/jobs/{job_id}")
        except ClientError as error:
            if error.status == 404:
                return None
            raise
        return view

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._sockets.cleanup()


class SlurmStack(Cluster):
    """A daemon beside a Slurm cluster, with the jobs of this test. `settings`: variables for every job of it."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *,
        daemon: Daemon | None = None,
        settings: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self.slurm = slurm
        self._python = python
        self.folder = folder
        self.stack: Any = daemon or Daemon(slurm, folder / "tmd")
        self._settings = settings

    def settle(self) -> None:
        """No job, no drain, every part of Slurm and the daemon run."""
        self.slurm.settle()
        self.stack.revive()

    def started(self, *, standby: int, options: tuple[str, ...] = (), user: str | None = None) -> SlurmJob:
        """A job whose standbys are ready."""
        return self.several_started(1, standby=standby, options=options, user=user)[0]

    def several_started(
        self, number: int, *, standby: int, options: tuple[str, ...] = (), user: str | None = None
    ) -> list[SlurmJob]:
        given: dict[str, Any] = {"steps": STEPS, "pace_ms": IDLE_PACE_MS, "options": options, "user": user}
        jobs = [self.sbatch(standby=standby, **given) for _ in range(number)]
        for job in jobs:
            job.wait_ready(standby)
        for job in jobs:
            job.set_pace(PACE_MS)
        return jobs

    def sbatch(
        self,
        *,
        nodes: int = WORLD_SIZE,
        standby: int | str = 0,
        steps: int,
        pace_ms: float = PACE_MS,
        options: tuple[str, ...] = (),
        user: str | None = None,
        srun: str = "srun",
        training: tuple[str, ...] = (str(TRAIN),),
    ) -> SlurmJob:
        """A job of `nodes` ranks that train and `standby` nodes more, or as many as that of the pool. Returns once the daemon
        knows it. `srun`: how the script calls it. `training`: another program than these tests' own, and its arguments."""
        job = self.prepared(self.slurm.places.shared / f"job{next(NUMBERS)}", steps, pace_ms)
        script = f"{srun} {self.command(str(job.out), steps, training)}\necho $? > {job.out}/srun.code"
        asked = (f"--nodes={nodes}", "--ntasks-per-node=1", *((f"--standby={standby}",) if standby else ()))
        places = (f"--output={job.out}/output", f"--chdir={job.out}")
        environment = {**self.environment(), **job.faults.environment()}
        job.id = self.slurm.sbatch(script, *asked, *places, *options, env=environment, user=user)
        until(lambda: self.stack.job(job.id), f"the daemon knows {job.id}: {job.logs()}", every_s=0.1)
        return job

    def prepared(self, out: Path, steps: int, pace_ms: float) -> SlurmJob:
        """A job with a folder into which every user may write; it is submitted by who calls this."""
        out.mkdir()
        out.chmod(0o777)
        job = SlurmJob(self, out)
        job.steps = steps
        job.set_pace(pace_ms)
        return job

    def command(self, out: str, steps: int, training: tuple[str, ...] = (str(TRAIN),)) -> str:
        """The training, as a script calls it."""
        return f"{self._python} -m tmd_worker.agent {' '.join(training)} --out {out} --steps {steps}"

    def environment(self) -> dict[str, str]:
        """What a job must know of the daemon."""
        return {"TMD_DAEMON": f"unix:{self.stack.socket}", **(self._settings or {})}


class SlurmJob(Job):
    """One job of Slurm and of tmd."""

    cluster: SlurmStack

    def __init__(self, cluster: SlurmStack, out: Path) -> None:
        super().__init__(cluster, out)
        #: As squeue is asked for it: a task of an array by array and number, since the array's own id means all of them.
        self.listed_as = ""

    def _listed(self, what: str) -> str:
        """What squeue prints of it in this format; empty once it has ended."""
        job = self.listed_as or self.id
        return self.cluster.slurm.run("squeue", "--noheader", f"--jobs={job}", f"--format={what}", check=False).stdout.strip()

    def allocation(self) -> set[str]:
        """The nodes that Slurm lists; none of a job that has ended."""
        listed = self._listed("%N")
        if not listed:
            return set()
        return set(self.cluster.slurm.run("scontrol", "show", "hostnames", listed).stdout.split())

    def batch_host(self) -> str:
        return self._listed("%B")

    def rank_off_the_batch_host(self, *, but: int | None = None) -> tuple[int, str]:
        """A rank whose node Slurm would take back, and that node. `but`: not this one."""
        batch_host = self.batch_host()
        return next((rank, node) for rank in range(WORLD_SIZE) if rank != but and (node := self.node_of(rank)) != batch_host)

    def drain(self, node: str, reason: str = "bad DIMM") -> None:
        """As an administrator does it, past tmd."""
        self.cluster.slurm.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")

    def timed_drain(self, node: str) -> tuple[dict[str, Any], float, float]:
        """The node is drained and the move that follows is seen to its end: its record, how long after the order had been given
        it began, and how long after the first step without the leaver Slurm had the node back, both in milliseconds."""
        ordered_s = time.time()
        self.drain(node)
        slurm = self.cluster.slurm
        until(lambda: slurm.states()[node] == "IDLE+DRAIN", f"{node} is IDLE+DRAIN: {self.view()['sentence']}")
        idle_s = time.time()
        record = self.wait_move(node)
        return record, (record["started_s"] - ordered_s) * 1000, (idle_s - record["ended_s"]) * 1000

    def wait_move(self, node: str) -> dict[str, Any]:
        """The record of the migration that empties this node, once it is done and all that it cost is known."""

        def move() -> dict[str, Any] | None:
            found = [
                each for each in self.migrations() if node in each["from_nodes"] and each["state"] not in ("aborted", "failed")
            ]
            return found[-1] if found else None

        record = until(move, f"a migration off {node}: {self.view()['sentence']}", every_s=0.05)
        assert record is not None
        return self.wait_measured(record["migration_id"])

    def moves_off(self, node: str) -> list[dict[str, Any]]:
        """The migrations that have emptied this node."""
        return [move for move in self.migrations() if node in move["from_nodes"] and move["state"] == "done"]

    def agent_pid(self, node: str) -> int:
        """Of the newest agent that the job has had on this node; an agent's id has its pid in it."""
        agent_id: str = self.use_of(node)["agent_id"]
        return int(agent_id.removeprefix(f"{node}-").partition("-")[0])

    def wait_written(self, steps: int) -> None:
        """So many more steps are committed, as the ranks' files say: the daemon is not asked."""
        target = max((row["step"] for row in self.rows()), default=0) + steps
        until(lambda: any(row["step"] >= target for row in self.rows()), f"step {target} of {self.id} is written")

    def wait_given_back(self, node: str) -> None:
        """Slurm has the node again."""
        until(lambda: node not in self.allocation(), f"{node} has left the job: {self.node_sentence(node)}")

    def wait_gone(self) -> None:
        """Slurm has ended the job, and no process of it is left on any node."""
        until(lambda: not self.allocation(), f"job {self.id} has left the queue\n{self.logs()}", every_s=0.1)
        until(lambda: not self.processes(), f"processes of job {self.id} have ended: {self.processes()}")

    def processes(self) -> dict[int, str]:
        """Pid -> command line of its agents and ranks, wherever they are."""
        return _processes_with(f"--out\0{self.out}\0")

    def cancel(self) -> None:
        self.cluster.slurm.run("scancel", self.id)
        self.wait_gone()

    def finish(self) -> None:
        """Runs to its end, as fast as it can."""
        self.set_pace(0)
        self.wait_state("done")
        self.wait_gone()

    def srun_code(self) -> int:
        """What the srun of the job's script ended with."""
        return int((self.out / "srun.code").read_text())

    def logs(self) -> str:
        path = self.out / "output"
        return path.read_text(errors="replace")[-6000:] if path.exists() else "(no output yet)"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing (SIGSTOP)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: is_stopped(pid), f"process {pid} is stopped")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # its silence may have cost it its life
            os.kill(pid, signal.SIGCONT)


def _processes_with(needle: str) -> dict[int, str]:
    """Pids and command lines that hold it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (text := (entry / "cmdline").read_text()):
                    found[int(entry.name)] = text.replace("\0", " ")
    return found
