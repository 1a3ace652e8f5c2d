"""A pool of standby nodes on a test cluster: its reservation, a daemon that takes nodes from it, and jobs of an ordinary user."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from tests.e2e.cluster import ROOT, TRAIN, WORLD_SIZE, until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.stack import IDLE_PACE_MS, NUMBERS, Daemon, SlurmJob, SlurmStack
from tests.slurm.users import ALICE, user

RESERVATION = "standby"
#: Fewer than the reference has, but enough for two moves.
STEPS = 200
#: Alice's account.
ACCOUNT = "lab"
#: A copy of this interpreter that alice can run: this one may lie in root's home.
SYSTEM_PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


def enrol(slurm: SlurmCluster) -> None:
    """Slurm knows alice and her account; if it does already, that is no harm."""
    slurm.run("sacctmgr", "-i", "add", "account", ACCOUNT, check=False)
    slurm.run("sacctmgr", "-i", "add", "user", ALICE, f"account={ACCOUNT}", check=False)


def reserve(slurm: SlurmCluster, *nodes: str, who: str = f"Accounts={ACCOUNT}") -> None:
    """As docs/slurm.md says."""
    slurm.run(
        *("scontrol", "create", "reservation", f"ReservationName={RESERVATION}", "StartTime=now", "Duration=infinite"),
        *(f"Nodes={','.join(nodes)}", who, "Flags=IGNORE_JOBS"),
    )


def unreserve(slurm: SlurmCluster) -> None:
    """Ends what runs in the reservation, and then that."""

    def gone() -> bool:
        for job in members(slurm):
            slurm.run("scancel", job, check=False)
        slurm.run("scontrol", "delete", f"reservationname={RESERVATION}", check=False)
        return f"={RESERVATION} " not in slurm.run("scontrol", "-o", "show", "reservation").stdout

    slurm.wait_for(gone, "the reservation to go")


def members(slurm: SlurmCluster) -> dict[str, str]:
    """Jobs in the reservation -> the nodes that they hold."""
    text = slurm.run("squeue", "-h", "-R", RESERVATION, "-o", "%A %N", check=False).stdout
    return {line.split()[0]: line.partition(" ")[2].strip() for line in text.splitlines()}


class OpenDaemon(Daemon):
    """Its socket is alice's, too, as it is of the users' group where users share a machine with the daemon."""

    def start(self) -> None:
        super().start()
        self.socket.parent.chmod(0o755)
        os.chown(self.socket, -1, user(ALICE).gid)


class PoolStack(SlurmStack):
    """Use as a context manager. All jobs are alice's."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        super().__init__(slurm, folder, daemon=OpenDaemon(slurm, folder / "tmd"), python=_python_for_alice(slurm))

    def training(self, asked: str) -> SlurmJob:
        """A job with `--standby=asked` whose ranks train, slowly enough for standbys to start meanwhile."""
        out = self.slurm.places.shared / f"alice{next(NUMBERS)}"
        out.mkdir()
        out.chmod(0o777)
        job = SlurmJob(self, out)
        job.steps = STEPS
        job.set_pace(IDLE_PACE_MS)
        script = f"srun {self._python} -m tmd_worker.agent {TRAIN} --out {out} --steps {STEPS}"
        job.id = self.slurm.sbatch(
            script,
            *(f"--nodes={WORLD_SIZE}", "--ntasks-per-node=1", f"--standby={asked}", f"--output={out}/output", f"--chdir={out}"),
            user=ALICE,
            env={
                "TMD_DAEMON": f"unix:{self.stack.socket}",
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "worker"), sysconfig.get_path("purelib"))),
                **job.faults.environment(),
            },
        )
        until(lambda: any(job.rows()), f"job {job.id} trains: {job.logs()}", every_s=0.1)
        return job

    def returned(self, *nodes: str) -> None:
        """These nodes of the pool are free again, and nobody holds any job in it."""
        self.slurm.wait_for(lambda: not members(self.slurm), "every job in the reservation to end")
        for node in nodes:
            self.slurm.wait_state(node, "IDLE+RESERVED")


def _python_for_alice(slurm: SlurmCluster) -> Path:
    for python in (Path(sys.executable), SYSTEM_PYTHON):
        try:
            slurm.run(str(python), "-c", "", user=ALICE)
        except PermissionError:
            continue
        return python
    raise AssertionError(f"{ALICE} can run neither {sys.executable} nor {SYSTEM_PYTHON}")
