"""Calling an epoch off: the beginning of every recovery. From here on nothing of the running attempt counts until a
resolution says what does."""

from __future__ import annotations

from tmd.core.job import Job
from tmd.core.processes import Process
from tmd.core.under_way import Recovery


def call_off(job: Job, now: float, sign: str, *, sign_s: float, cause: int | None = None) -> None:
    """Poisons every epoch that anybody may be running in, the successor of an outstanding plan included.

    In a recovery in progress it only ends the attempt to install: nobody was told to go, so what was resolved stands.
    """
    if job.recovery is not None:
        job.attempt = None
        job.stale = True
        job.evolve(now, poison_epoch=job.record.epoch_limit)
        return
    event = job.tell(now, job.job_id, "poison", f"epochs up to {job.record.epoch_limit} are called off: {sign}", cause)
    job.recovery = Recovery(since_s=now, sign=sign, sign_s=sign_s, cause=event)
    job.recovery.must_restart = _builder(job)
    for rank, process in job.holders().items():
        if not process.active:  # a leaver that was lost after the flip: its joiner was to take the role
            job.vacate(rank)
            job.recovery.failed_nodes.add(process.node)
    job.failed_attempts, job.retry_at_s = 0, 0.0
    job.evolve(now, state="recovering", poison_epoch=job.record.epoch_limit)


def note_loss(job: Job, rank: int, process: Process, sign: str, cause: int) -> None:
    """A role has lost its holder in the recovery in progress. The first loss explains the recovery better than the peers that
    noticed it, who may have been faster."""
    recovery = job.recovery
    assert recovery is not None, "a loss outside a recovery"
    if not recovery.lost:
        recovery.sign, recovery.cause = sign, max(cause, recovery.cause)
    recovery.lost.setdefault(rank, process.incarnation)
    recovery.failed_nodes.add(process.node)
    job.attempt = None
    recovery.must_restart = recovery.must_restart or _builder(job)


def _builder(job: Job) -> str:
    """A member that has not reached its first step, in words; empty if there is none. What it builds cannot be rolled back."""
    for process in job.holders().values():
        if process.report.phase in ("starting", "building") and process.report.version >= 0 and process.record.state == "member":
            return f"{job.name(process)} was still {process.report.phase}"
    return ""
