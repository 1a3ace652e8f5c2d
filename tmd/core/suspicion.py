"""Whom failed installations of an epoch speak against.

A rank that dials another one and does not reach it names it. One word proves nothing: either of the two may be cut off, or out of
descriptors. Over several attempts the pairs tell: who is in all of them is the one at fault, however many others were replaced
in vain before.
"""

from __future__ import annotations

import collections

from tmd.core import words
from tmd.core.job import Job
from tmd.core.processes import Process
from tmd.core.under_way import Attempt, Recovery

#: Two ranks that stay get as many attempts before one of them is replaced.
ATTEMPTS_OF_STAYERS = 3


def note_pairs(job: Job, attempt: Attempt) -> bool:
    """Keeps what the ranks say of an attempt that has failed; False if nobody names anybody, or there is no recovery."""
    if job.recovery is None:
        return False
    holders, epoch = job.holders(), attempt.install.membership.epoch
    pairs = frozenset(
        frozenset((process.incarnation, holders[process.report.unreached].incarnation))
        for rank, process in holders.items()
        if process.report.unreached_epoch == epoch and process.report.unreached in holders and process.report.unreached != rank
    )
    if pairs:
        job.recovery.unreached.append(pairs)
    return bool(pairs)


def suspects(job: Job, attempt: Attempt) -> dict[str, str]:
    """Incarnation -> why it is to be replaced, after an attempt of which `note_pairs` has kept something. In this order:

    - the staying rank that is in every pair of all attempts, with two others at least, if its state is had elsewhere;
    - the joiners in the pairs of the last attempt: they have never had a link, the others had theirs until just now;
    - after ATTEMPTS_OF_STAYERS of them: of the staying ranks in those pairs the one that is in most pairs of all attempts; of
      several, that of the highest number.
    """
    recovery = job.recovery
    assert recovery is not None, "suspicion belongs to a recovery"
    joining = {process.incarnation for rank, process in job.holders().items() if rank in attempt.install.joining}
    staying = {process.incarnation: process for process in job.holders().values() if process.incarnation not in joining}
    pairs = [pair for attempted in recovery.unreached for pair in attempted]
    named = frozenset().union(*recovery.unreached[-1])
    for incarnation in frozenset.intersection(*pairs) & staying.keys():
        others = frozenset().union(*pairs) - {incarnation}
        if len(others) > 1 and _has_replica(staying, incarnation, attempt.install.target_step):
            return {incarnation: f"{len(others)} others, one after the other or at once, could open no link to it"}
    if named & joining:
        return {each: _charge(job, recovery, each) for each in named & joining}
    if len(recovery.unreached) < ATTEMPTS_OF_STAYERS:
        return {}
    counts = collections.Counter(each for pair in pairs for each in pair)
    worst = max(named, key=lambda each: (counts[each], staying[each].record.rank or 0))
    equals = sum(counts[each] == counts[worst] for each in named)
    rule = "; nothing tells which of the two is at fault: the higher number goes" if equals > 1 else ""
    return {worst: _charge(job, recovery, worst) + rule}


def _has_replica(staying: dict[str, Process], suspect: str, target_step: int) -> bool:
    return any(process.can_reach(target_step) for incarnation, process in staying.items() if incarnation != suspect)


def _charge(job: Job, recovery: Recovery, incarnation: str) -> str:
    others = frozenset().union(*(pair for pair in recovery.unreached[-1] if incarnation in pair)) - {incarnation}
    ranks = sorted(rank for rank, process in job.holders().items() if process.incarnation in others)
    count = sum(any(incarnation in pair for pair in attempted) for attempted in recovery.unreached)
    return f"no link between it and {words.ranks(ranks)} could be opened in {words.count(count, 'attempt')} to install an epoch"
