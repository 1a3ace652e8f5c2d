"""Installing an epoch: everybody opens the links of one table, who joins takes its state, and when all have, the word to go
on is written and given. An attempt that fails is followed by another under the next epoch."""

from __future__ import annotations

from tmd.core import suspicion, words
from tmd.core.job import Job
from tmd.core.losses import lose
from tmd.core.processes import Process
from tmd.core.under_way import Attempt
from tmd.protocol.membership import Install, Membership, Source

#: Wait before attempt n + 1: n times this, at most RETRY_LIMIT_S; the first retry comes at once.
RETRY_STEP_S = 0.2
RETRY_LIMIT_S = 2.0
#: When this many attempts in a row have failed, somebody is replaced: whom suspicion.py names, else who joins; of those that were
#: late, members too.
ATTEMPTS_PER_MEMBER = 3


def start(job: Job, now: float, *, fresh: bool, target_step: int, joining: dict[int, Source]) -> None:
    """A new epoch for the holders of all roles. Every epoch before it is dead from now on."""
    epoch = job.record.epoch_limit + 1
    members = {rank: process.member() for rank, process in job.holders().items()}
    install = Install(membership=Membership(epoch=epoch, members=members), target_step=target_step, joining=joining, fresh=fresh)
    job.attempt = Attempt(install, now, number=job.failed_attempts + 1)
    job.evolve(now, epoch_limit=epoch, poison_epoch=epoch - 1)
    if fresh and job.record.state == "forming":
        job.evolve(now, state="installing")
    text = f"epoch {epoch} is being installed, first step {target_step}"
    if joining:
        text += f", joining: {', '.join(f'rank {rank} ({members[rank].incarnation})' for rank in sorted(joining))}"
    job.tell(now, job.job_id, "install", text)


def wait_to_retry(job: Job, now: float) -> str | None:
    """A sentence while it is too early for the next attempt."""
    if now >= job.retry_at_s:
        return None
    job.wake_at(job.retry_at_s)
    return f"attempt {job.failed_attempts} to install an epoch failed: trying again shortly"


def check(job: Job, now: float) -> str | None:
    """A sentence while the attempt goes on; None when it is over: every member is linked, or it failed."""
    attempt = job.attempt
    assert attempt is not None, "no attempt to look at"
    epoch = attempt.install.membership.epoch
    holders = job.holders()
    failed = [process for process in holders.values() if max(process.report.failed_epoch, process.report.poisoned_epoch) >= epoch]
    if failed:
        _give_up_failed(job, now, attempt, failed)
        return None
    late = [rank for rank, process in holders.items() if process.report.linked_epoch < epoch]
    if not late:
        return None
    busy = [rank for rank, process in holders.items() if _is_in_step(job, now, process)]
    if busy:
        return _wait_for_steps(job, now, attempt, busy)
    deadline = max(attempt.since_s, attempt.busy_s) + job.settings.install_timeout_s
    job.wake_at(deadline)
    if now >= deadline:
        _replace_late(job, now, [holders[rank] for rank in late], attempt)
        return None
    return f"installing epoch {epoch}: waiting for {words.ranks(late)}"


def _is_in_step(job: Job, now: float, process: Process) -> bool:
    """It is alive, and what it computes cannot be broken off: its state can be had at the next boundary."""
    return process.report.in_step and now - process.heard_s < job.settings.heartbeat_timeout_s


def _wait_for_steps(job: Job, now: float, attempt: Attempt, busy: list[int]) -> str | None:
    """A step may take long; one that takes longer than ranks hold will not end."""
    attempt.busy_s = now
    deadline = attempt.since_s + job.settings.hold_limit_s
    if now < deadline:
        job.wake_at(min(deadline, now + job.settings.heartbeat_timeout_s))
        return f"installing epoch {attempt.install.membership.epoch}: {words.ranks(busy)} still in a step"
    for rank in busy:
        lose(job, now, job.holders()[rank], f"it did not come to the end of its step in {job.settings.hold_limit_s:g} s")
    return None


def is_linked(job: Job) -> bool:
    """Every member has its links and its state: the word to go on may be given."""
    attempt = job.attempt
    if attempt is None or job.vacant():
        return False
    epoch = attempt.install.membership.epoch
    return all(
        process.report.linked_epoch >= epoch and max(process.report.failed_epoch, process.report.poisoned_epoch) < epoch
        for process in job.holders().values()
    )


def go(job: Job, now: float) -> int:
    """Everybody may run in the new epoch: written first, then said. Returns the event."""
    attempt = job.attempt
    assert attempt is not None, "nothing was installed"
    table = attempt.install.membership
    for process in job.holders().values():
        if process.record.state != "member":
            job.set_process(now, process, state="member")
    job.attempt = None
    job.failed_attempts = 0
    job.progress_s = job.live_since_s = now
    job.evolve(now, state="running", epoch=table.epoch, table=table)
    for process in job.holders().values():
        if job.nodes[process.node].use != "training":
            job.set_node(now, process.node, use="training")
    return job.tell(now, job.job_id, "live", f"epoch {table.epoch} is live from step {attempt.install.target_step}")


def _give_up_attempt(job: Job, now: float, reason: str) -> None:
    job.attempt = None
    job.failed_attempts += 1
    job.last_failure = reason
    job.retry_at_s = now + min(RETRY_LIMIT_S, RETRY_STEP_S * (job.failed_attempts - 1))
    job.tell(now, job.job_id, "install_failed", reason)
    job.evolve(now, poison_epoch=job.record.epoch_limit)


def _give_up_failed(job: Job, now: float, attempt: Attempt, failed: list[Process]) -> None:
    """Somebody says that it cannot be installed."""
    reasons = "; ".join(f"{job.name(process)}: {process.report.reason or 'no reason given'}" for process in failed[:3])
    named = suspicion.note_pairs(job, attempt)
    _give_up_attempt(job, now, f"epoch {attempt.install.membership.epoch} could not be installed: {reasons}")
    if attempt.number % ATTEMPTS_PER_MEMBER:
        return
    if named:
        _replace_suspects(job, now, attempt)
        return
    for rank in attempt.install.joining:
        lose(job, now, job.holders()[rank], f"{attempt.number} attempts to install an epoch with it failed: {reasons}")


def _replace_suspects(job: Job, now: float, attempt: Attempt) -> None:
    for incarnation, reason in suspicion.suspects(job, attempt).items():
        lose(job, now, job.processes[incarnation], reason)


def _replace_late(job: Job, now: float, late: list[Process], attempt: Attempt) -> None:
    """Who has not linked in time is replaced if it joins, or if it has failed too often; if ranks name whom they do not reach,
    those who only wait for them are spared."""
    epoch = attempt.install.membership.epoch
    named = suspicion.note_pairs(job, attempt)
    _give_up_attempt(job, now, f"epoch {epoch} was not installed in {job.settings.install_timeout_s:g} s")
    if named:
        _replace_suspects(job, now, attempt)
        return
    for process in late:
        joins = process.record.rank in attempt.install.joining
        if joins or attempt.number >= ATTEMPTS_PER_MEMBER:
            lose(job, now, process, f"it did not install epoch {epoch} in time")
