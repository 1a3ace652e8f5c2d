"""A node's state becomes a job's business: written down, and told if it is news."""

from __future__ import annotations

from tmd.core.job import Job
from tmd.core.records import NodeState
from tmd.core.requests import DRAINED_STATES


def change(job: Job, now: float, node: str, state: NodeState, reason: str) -> bool:
    """Returns whether anything has changed. That nothing is known of a node ends no drain: nobody has said so."""
    known = job.nodes[node]
    if (known.state, known.reason) == (state, reason):
        return False
    if state == "unknown" and known.state in DRAINED_STATES:
        return False
    job.set_node(now, node, state=state, reason=reason)
    if known.state != state:
        job.drained_since_s[node] = now
        job.tell(now, node, "node", f"{node} is {state}{f': {reason}' if reason else ''}", 0)
    return True
