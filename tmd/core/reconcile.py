"""One look at the whole of a job: what has happened is taken in, the next thing is done, and one sentence says what is
waited for. Called after every event and at every deadline; calling it once more changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from tmd.core import (
    ending,
    forming,
    growing,
    holding,
    launching,
    losses,
    planned,
    recovery,
    releasing,
    requests,
    standby,
    upkeep,
    words,
)
from tmd.core.job import Job
from tmd.core.poison import call_off

#: Transitions that one look may make before it leaves the rest to the next: a bound against a loop.
ROUNDS = 8


def reconcile(job: Job, now: float, *, paused: bool, suspects_itself: Callable[[], bool]) -> None:
    """Brings the job as far as it can go now, and sets `job.sentence` and `job.wake_s`."""
    job.wake_s = None
    if job.over:
        job.sentence = job.record.reason
        return
    launching.tidy(job, now)
    waiting = _settle_after_restart(job, now)
    if waiting is not None:
        job.sentence = waiting
        return
    if holding.excuse_suspension(job, now):
        job.sentence = "suspended: its processes are stopped, so nothing is decided until it is resumed"
        return
    for _ in range(ROUNDS):
        before = (job.record, job.attempt, job.recovery)
        job.sentence = _step(job, now, paused=paused, suspects_itself=suspects_itself)
        if job.over or before == (job.record, job.attempt, job.recovery):
            break
    upkeep.measure(job, now)
    if not job.over:
        standby.keep_warm(job, now)
        upkeep.chase_retired(job, now)
        launching.advance(job, now)
        growing.advance(job, now)
        releasing.advance(job, now)
        if job.growth_sentence and job.vacant() and job.record.state == "recovering":
            job.sentence = f"{job.sentence}; {job.growth_sentence}"


def _step(job: Job, now: float, *, paused: bool, suspects_itself: Callable[[], bool]) -> str:
    planned.take_evidence(job, now)
    losses.note_exits(job, now)
    if not job.over:
        losses.note_silence(job, now, suspects_itself)
    if not job.over:
        losses.note_silent_joiners(job, now)
    if not job.over:
        _note_user_failure(job, now)
    if not job.over:
        upkeep.measure(job, now)
        ending.consider_finishing(job, now)
    if job.over:
        return job.record.reason
    if job.record.state == "finishing":
        return ending.finish(job, now)
    if job.fresh:
        return forming.advance(job, now)
    if job.record.state == "running":
        sentence = _run(job, now, paused=paused)
        if job.record.state == "running" or job.over:
            return sentence
    requests.advance_queue_while_recovering(job)
    return recovery.advance(job, now)


def _note_user_failure(job: Job, now: float) -> None:
    process = losses.user_failure(job)
    if process is not None:
        ending.fail_job(job, now, 1, f"{job.name(process)} failed in the user's script:\n{process.report.error}")


def _run(job: Job, now: float, *, paused: bool) -> str:
    """A running job: trouble first, then what is planned."""
    recovery.notice_trouble(job, now)
    if job.record.state != "running":
        return job.sentence
    silent = losses.silent_rank(job, now)
    if silent is not None:
        call_off(job, now, f"{job.name(silent)} says nothing and no step is committed", sign_s=silent.heard_s)
        return job.sentence
    slow = _build_overdue(job, now)
    if slow is not None:
        ending.fail_job(job, now, 1, slow)
        return job.record.reason
    requests.advance(job, now, paused=paused)
    flying = job.flying()
    if flying is not None:
        return f"running; {flying.migration_id}: {job.migration_sentences.get(flying.migration_id, flying.state)}"
    building = [rank for rank, process in job.holders().items() if process.report.phase in ("starting", "building", "warming")]
    if building:
        return f"{words.ranks(building)} {'builds' if len(building) == 1 else 'build'}: no step yet"
    return "running"


def _build_overdue(job: Job, now: float) -> str | None:
    """Why the job must be given up because a rank never came to its first step, or None."""
    for process in job.holders().values():
        if process.report.phase in ("starting", "building", "warming"):
            deadline = job.live_since_s + job.settings.build_timeout_s
            if now >= deadline:
                return f"{job.name(process)} has not come to its first step in {job.settings.build_timeout_s:g} s; see its log"
            job.wake_at(deadline)
    return None


def _settle_after_restart(job: Job, now: float) -> str | None:
    """A sentence while agents are still reconnecting to a restarted daemon: nothing is decided before."""
    if job.settling_until_s is None:
        return None
    known = {process.record.agent_id for process in job.active() if process.record.state != "standby"}
    away = [agent for agent in job.agents.values() if agent.agent_id in known and agent.serves and not agent.reported]
    if away and now < job.settling_until_s:
        job.wake_at(job.settling_until_s)
        return f"the daemon has restarted: waiting for the agents of {', '.join(sorted(agent.node for agent in away))}"
    job.settling_until_s = None
    job.progress_s = job.live_since_s = now
    text = f"not back yet: {', '.join(sorted(agent.node for agent in away))}" if away else "all its agents are back"
    job.tell(now, job.job_id, "settled", f"the daemon has restarted and carries on; {text}")
    return None
