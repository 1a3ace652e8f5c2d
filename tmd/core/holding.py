"""Takes in what the resource manager says that a job holds. A node counts as given back only once it is no longer listed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tmd.core import time_left, upkeep
from tmd.core.allocation import Allocation
from tmd.core.ending import EXIT_CANCELLED, fail_job
from tmd.core.job import Job
from tmd.core.records import NodeState


def take(job: Job, now: float, word: Allocation, states: Mapping[str, tuple[NodeState, str]]) -> None:
    """`states`: what is known of nodes, whichever job uses them."""
    before = job.allocation
    if before is not None and before.preempted_s is not None and not word.live:
        word = msgspec.structs.replace(word, preempted_s=before.preempted_s)  # of what came of it nobody says why
    job.allocation = word
    if word == before or job.over:
        return
    lived = before is not None and before.live
    if word.state == "over" or (word.state == "unlisted" and lived):
        why = word.reason or "the resource manager does not list it any more"
        fail_job(job, now, EXIT_CANCELLED, f"its allocation has ended: {why}")
        return
    if not word.live:
        return
    for node in word.nodes:
        if node not in job.nodes:
            state, reason = states.get(node, ("unknown", ""))
            job.set_node(now, node, use="standby", state=state, reason=reason)
        elif before is not None and lived and node not in before.nodes:
            come_again(job, now, node)
    for node in sorted(set(before.nodes if before is not None and lived else ()) - set(word.nodes)):
        _node_gone(job, now, node)
    if word.state != (before.state if before is not None and lived else "running"):
        _suspended_or_resumed(job, now, word)
    time_left.note(job, now, before, word)


def come_again(job: Job, now: float, node: str) -> None:
    """The job had it before, gave it back and has got it again."""
    if job.nodes[node].use in ("released", "lost") and job.agent_on(node) is None:
        job.leaving_nodes.pop(node, None)
        job.set_node(now, node, use="standby", agent_id="", reason="")


def _node_gone(job: Job, now: float, node: str) -> None:
    """Given back, or cut out of the job by the resource manager."""
    text = f"{node} is no longer part of the job's allocation"
    job.tell(now, node, "given_back", text)
    job.leaving_nodes.pop(node, None)
    record = job.nodes[node]
    if record.use == "standby" and job.agent_on(node) is None:
        job.set_node(now, node, use="released", reason=text)


def _suspended_or_resumed(job: Job, now: float, word: Allocation) -> None:
    kind = "suspended" if word.state == "suspended" else "resumed"
    job.tell(now, job.job_id, kind, f"the resource manager has {kind} the job{f': {word.reason}' if word.reason else ''}")
    job.suspended_seen_s = now


def excuse_suspension(job: Job, now: float) -> bool:
    """True while the job is suspended: its processes are stopped, so their silence means nothing, then and right after."""
    suspended = job.allocation is not None and job.allocation.state == "suspended"
    if job.suspended_seen_s is not None:
        upkeep.excuse_silence(job, now, now - job.suspended_seen_s)
        job.suspended_seen_s = now if suspended else None
    return suspended
