"""The end of a job that no move can help against: its time is up, or it was preempted. Nothing planned is begun any more that
would not be over by then; what is under way goes on."""

from __future__ import annotations

from tmd.core.allocation import Allocation
from tmd.core.job import Job

#: The end of a job's time is told of so long before it comes.
ENDING_NOTICE_S = 900.0
#: A move takes at least this long, or this many steps.
LEAST_MOVE_S = 10.0
MOVE_STEPS = 5
#: A job that lives for so much longer than its time is allowed to (Slurm: OverTimeLimit), nobody knows for how long.
OVERTIME_S = 60.0
#: Of PHASES those that begin once a standby is chosen.
_WORK = ("prepare", "install", "copy", "first_step")


def too_late(job: Job, now: float) -> str:
    """Why no move can be begun any more; empty: one can."""
    word = job.allocation
    if word is None:
        return ""
    if word.preempted_s is not None:
        return "the resource manager has preempted the job and is about to end it"
    move_s = _move_s(job)
    if word.ends_s is None or not -OVERTIME_S < word.ends_s - now < move_s:
        return ""
    return f"the job's time ends in {max(0.0, word.ends_s - now):.0f} s, and a move takes {move_s:.0f} s"


def _move_s(job: Job) -> float:
    """As long as the longest of this job so far."""
    moves = [move for move in job.migrations.values() if move.kind == "planned" and move.state == "done"]
    longest_s = max((sum(move.phases_s.get(phase, 0.0) for phase in _WORK) for move in moves), default=0.0)
    return max(LEAST_MOVE_S, longest_s, MOVE_STEPS * (job.commits.normal_step_s() or 0.0))


def note(job: Job, now: float, before: Allocation | None, word: Allocation) -> None:
    """People are told that the end comes near, and why."""
    left_s = None if word.ends_s is None else max(0.0, word.ends_s - now)
    if word.preempted_s is not None:
        if before is None or before.preempted_s is None:
            grace = "" if left_s is None else f" in {left_s:.0f} s at the latest"
            told = "the ranks were told with SIGTERM, and nothing is moved any more"
            text = f"the resource manager has preempted the job and ends it{grace}; {told}"
            job.tell(now, job.job_id, "preempted", text)
    elif left_s is not None and left_s <= ENDING_NOTICE_S:
        job.say_once(now, job.job_id, f"ends {word.ends_s:.0f}", f"the job's time ends in {left_s / 60:.0f} min")
