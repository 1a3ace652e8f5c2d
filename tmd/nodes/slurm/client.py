"""What tmd needs to ask of Slurm: the small interface that the commands and pyslurm both serve.

Contract: every call ends by its deadline, and none blocks the event loop. No answer, or one that makes no sense, is QueryFailed:
after a change that ended so, nobody knows whether it happened. tests/slurm/test_client.py is the contract, run on real daemons.
"""

from __future__ import annotations

import re
from typing import Protocol

from tmd.nodes.base import QueryFailed, RequestRefused, ResourceManagerError, UnknownJob, UnknownNode
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation

#: What Slurm says (slurm_strerror) if it was not reached or did not answer.
_NO_ANSWER = re.compile(
    "unable to contact|connect failure|communication|timed out|zero bytes|authentication error|munge|standby mode|"
    "shutdown failure|not yet available|no data|receive failure|send failure",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile("invalid job id specified|invalid job id", re.IGNORECASE)
_UNKNOWN_NODE = re.compile("invalid node name specified$|^node .* (not found|does not exist)", re.IGNORECASE | re.MULTILINE)
_NO_RIGHT = re.compile("invalid user id|access/permission denied|permission denied", re.IGNORECASE)

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_JOB_ID = re.compile(r"[1-9][0-9]{0,9}")


class SlurmClient(Protocol):
    """Raises QueryFailed wherever Slurm does not answer, RequestRefused where it says no."""

    #: For `tmctl doctor` and the log: how it asks, and of which version.
    description: str

    async def nodes(self) -> list[SlurmNode]:
        """All of them."""
        ...

    async def node(self, name: str) -> SlurmNode:
        """Raises UnknownNode."""
        ...

    async def jobs(self) -> list[SlurmJob]:
        """All that have not ended."""
        ...

    async def job(self, job_id: str) -> SlurmJob:
        """One job, also for some minutes after its end (MinJobAge). Raises UnknownJob."""
        ...

    async def comment(self, job_id: str) -> str:
        """The comment that its owner has given a job. Raises UnknownJob."""
        ...

    async def reservations(self) -> list[SlurmReservation]: ...

    async def set_drain(self, node: str, reason: str) -> None:
        """Sets the flag and the reason, whatever was there before. Raises UnknownNode."""
        ...

    async def set_resume(self, node: str) -> None:
        """Raises UnknownNode; RequestRefused where nothing is to be ended."""
        ...

    async def set_job_nodes(self, job_id: str, nodes: tuple[str, ...]) -> None:
        """Leaves a running job these of its nodes; what it still runs on others is killed (SIGKILL).

        Raises UnknownJob.
        """
        ...

    async def close(self) -> None: ...


def failure(what: str, text: str) -> ResourceManagerError:
    """The exception for an error that Slurm has put into words."""
    said = " ".join(text.split()) or "no word of why"
    if _NO_ANSWER.search(said):
        return QueryFailed(f"{what}: {said}", "see that slurmctld and munged run: scontrol ping, munge -n | unmunge")
    if _UNKNOWN_JOB.search(said):
        return UnknownJob(f"{what}: {said}", "squeue --states=all")
    if _UNKNOWN_NODE.search(text.strip()):
        return UnknownNode(f"{what}: {said}", "sinfo --Node")
    if _NO_RIGHT.search(said):
        remedy = "give the daemon's user the right in Slurm: sacctmgr modify user NAME set adminlevel=Admin (see docs/slurm.md)"
        return RequestRefused(f"{what}: {said}", remedy)
    return RequestRefused(f"{what}: {said}")


def checked_node(name: str) -> str:
    """A name of one node: Slurm itself takes n[1-9], a,b and ALL as well. Raises UnknownNode."""
    if not _NODE_NAME.fullmatch(name) or name.upper() == "ALL":
        raise UnknownNode(f"{name[:80]!r} is no name of one node", "sinfo --Node")
    return name


def checked_job(job_id: str) -> str:
    """A number of one job. Raises UnknownJob."""
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJob(f"{job_id[:80]!r} is no number of a Slurm job", "squeue")
    return job_id


def one_line(reason: str) -> str:
    """A reason as Slurm can keep and show it: no control characters, never empty, at most 400 characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in reason).split())[:400] or "drained by tmd"
