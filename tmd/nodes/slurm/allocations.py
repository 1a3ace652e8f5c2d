"""What jobs hold by Slurm's word. Each life of a job (its id, and how often it was requeued) is a job of its own to tmd."""

from __future__ import annotations

import re
from collections.abc import Collection

from tmd.core.allocation import Allocation
from tmd.nodes.base import UnknownJob
from tmd.nodes.slurm.client import SlurmClient
from tmd.nodes.slurm.records import SlurmJob

#: States in which a job's processes run; in the others that hold nodes they are stopped, or are being ended.
RUNNING = frozenset({"RUNNING", "CONFIGURING", "SIGNALING", "RESIZING", "STAGE_OUT"})
_STOPPED = frozenset({"SUSPENDED", "STOPPED"})
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})

#: What plugins/tmd_standby.lua writes into a job's AdminComment, which only administrators can change.
_ASKED = re.compile(r"tmd:standby=(?P<count>\d{1,4});nodes=[\d-]+(?P<pool>;pool)?")


async def ask(client: SlurmClient, job_ids: Collection[str]) -> list[Allocation]:
    """One word for each of these jobs, which are named as their agents name them: one question for all that have not ended, and
    one for each of the others. Raises QueryFailed, RequestRefused."""
    live = {job.job_id: job for job in await client.jobs()}
    words = []
    for job_id in job_ids:
        number, _, life = job_id.partition(".")
        try:
            words.append(allocation(job_id, life or "0", live.get(number) or await client.job(number)))
        except UnknownJob:
            words.append(Allocation(job_id=job_id, state="unlisted"))
    return words


def allocation(job_id: str, life: str, job: SlurmJob) -> Allocation:
    """`life`: how often the job had been requeued when this life of it began."""
    if str(job.restart_count) != life or job.state in _WAITING:
        return Allocation(job_id=job_id, state="over", reason="Slurm has requeued the job")
    if job.state not in RUNNING | _STOPPED:
        return Allocation(job_id=job_id, state="over", reason=f"Slurm calls the job {job.state}")
    standby, pooled = asked_for(job)
    return Allocation(
        job_id=job_id,
        state="running" if job.state in RUNNING else "suspended",
        nodes=tuple(sorted(job.nodes)),
        batch_host=job.batch_host,
        ends_s=job.end_s,
        preempted_s=job.preempted_s,
        reservation=job.reservation,
        user=job.user,
        standby=standby,
        pooled=pooled,
    )


def asked_for(job: SlurmJob) -> tuple[int, bool]:
    """The standby nodes that a job was submitted with, and whether they are to come from the pool."""
    asked = _ASKED.search(job.admin_comment)
    return (int(asked["count"]), asked["pool"] is not None) if asked else (0, False)
