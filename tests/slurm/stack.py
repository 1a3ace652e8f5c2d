"""tmd on a real Slurm cluster: the daemon as a process of its own, jobs by sbatch, and what tests/e2e knows of a job."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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


class Daemon:
    """`tmd serve` for this cluster. Use as a context manager; `kill` and `start` give it another life."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder
        self._sockets = tempfile.TemporaryDirectory(prefix="tmd-slurm-sock-")
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
                [sys.executable, "-m", "tmd.daemon.main", "serve", *places, "--resource-manager", "slurm"],
                env=self._slurm.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
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
    """A daemon beside a Slurm cluster, with the jobs of this test."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.stack: Any = Daemon(slurm, folder / "tmd")
        self._numbers = itertools.count(1)

    def settle(self) -> None:
        """No job, no drain, every part of Slurm and the daemon run."""
        self.slurm.settle()
        self.stack.revive()

    def started(self, *, standby: int, options: tuple[str, ...] = ()) -> SlurmJob:
        """A job whose standbys are ready."""
        return self.several_started(1, standby=standby, options=options)[0]

    def several_started(self, number: int, *, standby: int, options: tuple[str, ...] = ()) -> list[SlurmJob]:
        jobs = [self.sbatch(standby=standby, steps=STEPS, pace_ms=IDLE_PACE_MS, options=options) for _ in range(number)]
        for job in jobs:
            job.wait_ready(standby)
        for job in jobs:
            job.set_pace(PACE_MS)
        return jobs

    def sbatch(
        self, *, nodes: int = WORLD_SIZE, standby: int = 0, steps: int, pace_ms: float = PACE_MS, options: tuple[str, ...] = ()
    ) -> SlurmJob:
        """A job of `nodes` ranks that train and `standby` nodes more. Returns once the daemon knows it."""
        out = self.slurm.places.shared / f"job{next(self._numbers)}"
        out.mkdir()
        out.chmod(0o777)
        job = SlurmJob(self, out)
        job.steps = steps
        job.set_pace(pace_ms)
        command = f"{sys.executable} -m tmd_worker.agent {TRAIN} --out {out} --steps {steps}"
        script = f"srun {command}\necho $? > {out}/srun.code"
        asked = (f"--nodes={nodes}", "--ntasks-per-node=1", *((f"--standby={standby}",) if standby else ()))
        places = (f"--output={out}/output", f"--chdir={out}")
        environment = {"TMD_DAEMON": f"unix:{self.stack.socket}", **job.faults.environment()}
        job.id = self.slurm.sbatch(script, *asked, *places, *options, env=environment)
        until(lambda: self.stack.job(job.id), f"the daemon knows {job.id}: {job.logs()}", every_s=0.1)
        return job


class SlurmJob(Job):
    """One job of Slurm and of tmd."""

    cluster: SlurmStack

    def __init__(self, cluster: SlurmStack, out: Path) -> None:
        super().__init__(cluster, out)

    def allocation(self) -> set[str]:
        """The nodes that Slurm lists; none of a job that has ended."""
        listed = self.cluster.slurm.run("squeue", "--noheader", f"--jobs={self.id}", "--format=%N", check=False).stdout.strip()
        if not listed:
            return set()
        return set(self.cluster.slurm.run("scontrol", "show", "hostnames", listed).stdout.split())

    def batch_host(self) -> str:
        return self.cluster.slurm.run("squeue", "--noheader", f"--jobs={self.id}", "--format=%B").stdout.strip()

    def rank_off_the_batch_host(self) -> tuple[int, str]:
        """A rank whose node Slurm would take back, and that node."""
        batch_host = self.batch_host()
        return next((rank, node) for rank in range(WORLD_SIZE) if (node := self.node_of(rank)) != batch_host)

    def drain(self, node: str, reason: str = "bad DIMM") -> None:
        """As an administrator does it, past tmd."""
        self.cluster.slurm.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")

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
        mark = f"--out\0{self.out}\0"
        until(lambda: not _processes_with(mark), f"processes of job {self.id} have ended: {_processes_with(mark)}")

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


def _processes_with(needle: str) -> list[str]:
    """Command lines that hold it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (text := (entry / "cmdline").read_text()):
                    found.append(text.replace("\0", " "))
    return found
