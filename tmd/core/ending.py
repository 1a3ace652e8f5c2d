"""How a job ends: every step committed and every rank gone with code 0, or with a reason and another code."""

from __future__ import annotations

from tmd.core import planned
from tmd.core.job import Job
from tmd.core.under_way import Recovery
from tmd.protocol.membership import Resolution

#: Exit code of a job that tmd gave up although its script did nothing wrong: worth trying again (EX_TEMPFAIL).
EXIT_GIVEN_UP = 75
#: Exit code of a job that an operator ended, as after SIGTERM.
EXIT_CANCELLED = 143


def fail_job(job: Job, now: float, exit_code: int, reason: str) -> None:
    """The job is over; every agent ends what still runs."""
    preempted = job.allocation is not None and job.allocation.preempted_s is not None
    _end(job, now, "failed", exit_code, f"it was preempted: {reason}" if preempted else reason)


def finish_job(job: Job, now: float) -> None:
    _end(job, now, "done", 0, f"all {job.record.world_size} ranks finished")


def _end(job: Job, now: float, state: str, exit_code: int, reason: str) -> None:
    job.attempt = job.recovery = job.flight = None
    job.evolve(now, state=state, exit_code=exit_code, reason=reason, steps=job.next_step(), plan=None, armed=False)
    event = job.tell(now, job.job_id, state, f"job {job.job_id} {state}: {reason}")
    for migration in job.open_migrations():
        outcome = "aborted" if migration.kind == "planned" else "failed"
        job.end_migration(now, migration.migration_id, outcome, f"the job has ended: {reason}", event)
    for node, record in job.nodes.items():
        if record.use in ("training", "standby"):
            job.set_node(now, node, use="released", reason=f"the job has ended: {reason}")
            job.leaving_nodes[node] = f"job {job.job_id} has ended"


def consider_finishing(job: Job, now: float) -> None:
    """The first rank that finishes proves that every step is committed; who leaves early is not followed by a replacement."""
    if job.flight is not None and job.flight.flipped_s is not None:
        return  # the joiner's first vote comes first
    if job.record.state == "finishing" or not (job.left or _finished(job)):
        return
    job.attempt = None
    if job.recovery is not None:
        _give_roles_back(job, now, job.recovery)
        job.recovery = None
    job.finishing_since_s = now
    planned.dissolve(job, now)
    job.evolve(now, state="finishing")
    event = job.tell(now, job.job_id, "finishing", "every step is committed: the ranks go on to their end")
    for migration in job.open_migrations():
        outcome = "aborted" if migration.kind == "planned" else "failed"
        job.end_migration(now, migration.migration_id, outcome, "the job had finished before it was done", event)


def _give_roles_back(job: Job, now: float, recovery: Recovery) -> None:
    """Nobody takes a lost rank's place any more: the roles are those of the last step, with who held them."""
    for rank, incarnation in recovery.lost.items():
        joiner = job.holder(rank)
        if joiner is not None and joiner.incarnation != incarnation:
            job.retire(now, joiner, "every step was committed without it")
        lost = job.processes[incarnation]
        job.give_role(rank, lost)
        if rank not in job.left:
            job.lost_at_end[rank] = f"rank {rank} on {lost.node} was lost after the last step ({lost.record.reason})"


def _finished(job: Job) -> bool:
    return any(process.report.phase == "finished" for process in job.holders().values())


def finish(job: Job, now: float) -> str:
    """Waits for the ranks to leave; tells the outcome of the last vote to those who did not get it."""
    alive = {rank: process for rank, process in job.holders().items() if process.active}
    if len(job.left) == job.record.world_size:
        finish_job(job, now)
        return job.record.reason
    if not alive:
        missing = [reason for rank, reason in sorted(job.lost_at_end.items()) if rank not in job.left]
        fail_job(job, now, 1, "; ".join(missing) or "ranks left without a word")
        return job.record.reason
    undecided = [process for process in alive.values() if process.report.phase != "finished"]
    if undecided and (job.lost_at_end or any(process.poisoned for process in undecided)):
        _decide_last_vote(job, now)
        if not _finished(job):
            deadline = job.finishing_since_s + job.settings.report_timeout_s
            job.wake_at(deadline)
            if now >= deadline:
                gone = ", ".join(str(rank) for rank in sorted({*job.left, *job.lost_at_end}))
                fail_job(job, now, 1, f"rank {gone} left at step {job.next_step()} although the others still had steps to run")
                return job.record.reason
    return f"finishing: {len(alive)} of {job.record.world_size} ranks still run"


def _decide_last_vote(job: Job, now: float) -> None:
    """A finished rank knows that the last vote said yes; its step number is the target for who is undecided."""
    steps = [process.report.next_step for process in job.holders().values() if process.report.phase == "finished"]
    if not steps or job.resolved():
        return
    epoch = job.record.epoch_limit
    resolution = Resolution(epoch=epoch, target_step=max(steps))
    job.evolve(now, poison_epoch=epoch, resolution=resolution)
    job.tell(now, job.job_id, "resolved", f"the last vote said yes: undecided ranks finish at step {max(steps)}")
