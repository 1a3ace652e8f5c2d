"""A pool of standby nodes on a test cluster: its reservation, and jobs of an ordinary user that may take nodes from it."""

from __future__ import annotations

from tests.e2e.cluster import until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.head import Head
from tests.slurm.stack import IDLE_PACE_MS, SlurmJob
from tests.slurm.users import ALICE

RESERVATION = "standby"
#: Of the cluster for jobs under tmd.
POOL = ("n9", "n10")
#: Fewer than the reference has, but enough for two moves.
STEPS = 200
#: Alice's account.
ACCOUNT = "lab"


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


def training(head: Head, asked: str) -> SlurmJob:
    """A job of alice's with `--standby=asked` whose ranks train, slowly enough for standbys to start meanwhile."""
    job = head.sbatch(standby=asked, steps=STEPS, pace_ms=IDLE_PACE_MS, user=ALICE)
    until(lambda: any(job.rows()), f"job {job.id} trains: {job.logs()}", every_s=0.1)
    return job


def returned(slurm: SlurmCluster, *nodes: str) -> None:
    """These nodes of the pool are free again, and nobody holds any job in it."""
    slurm.wait_for(lambda: not members(slurm), "every job in the reservation to end")
    for node in nodes:
        slurm.wait_state(node, "IDLE+RESERVED")
