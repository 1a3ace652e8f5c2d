"""What runs beside a job's main course: figures of migrations, retired processes that will not go, and time in which nobody's
silence counts."""

from __future__ import annotations

from tmd.core import words
from tmd.core.job import Job
from tmd.core.timings import complete


def measure(job: Job, now: float) -> None:
    """Ends unplanned migrations with their first commit, and fills in what each migration cost once that is known."""
    holders = list(job.holders().values())
    for migration in job.open_migrations():
        if migration.kind == "unplanned" and migration.state == "copying" and job.record.state in ("running", "finishing"):
            first = job.commits.first_in(job.record.epoch)
            if first is not None:
                text = f"{words.ranks(sorted(migration.leavers))} replaced, step {first.step} is the first with the joiner"
                job.end_migration(now, migration.migration_id, "done", text)
    for migration_id, window in list(job.windows.items()):
        migration = job.migrations[migration_id]
        if migration.ended_s is None:
            continue
        leavers = [job.processes[incarnation] for incarnation in migration.leavers.values()]
        changes, final = complete(window, migration, job.commits, holders, leavers)
        if changes and (final or migration.downtime_s is None or job.over):
            job.set_migration(migration_id, **changes)
        if final or job.over:
            del job.windows[migration_id]


def chase_retired(job: Job, now: float) -> None:
    """A retired process that has not left in time is no longer named, so its agent kills it."""
    for process in job.processes.values():
        if process.leave_until_s is None or process.exited:
            continue
        if now < process.leave_until_s:
            job.wake_at(process.leave_until_s)
        else:
            process.leave_until_s = None
            job.stale = True


def excuse_silence(job: Job, now: float, seconds: float) -> None:
    """What is counted from somebody's last word, or from an order to them, counts that much later."""
    for agent in job.agents.values():
        agent.heard_s = min(now, agent.heard_s + seconds)
        agent.gone_s = min(now, agent.gone_s + seconds)
    for process in job.processes.values():
        process.heard_s = min(now, process.heard_s + seconds)
    job.progress_s = min(now, job.progress_s + seconds)
    job.finishing_since_s = min(now, job.finishing_since_s + seconds)
    if job.recovery is not None:
        job.recovery.since_s = min(now, job.recovery.since_s + seconds)
    if job.attempt is not None:
        job.attempt.since_s = min(now, job.attempt.since_s + seconds)
