"""How a node of a local cluster looks from outside, by what the book says of it. Pure."""

from __future__ import annotations

import time

from tmd.nodes.base import NodeView
from tmd.nodes.local_state import Book, LocalJob, LocalNode, NodeMarks


def node_view(node: LocalNode, book: Book, notice_s: float) -> NodeView:
    """`notice_s`: a node that is killed or frozen is called down only after this long."""
    marks = book.marks_of(node.name)
    holders = [job for job in book.jobs.values() if _holds(job, node.name, marks)]
    base, reason = "IDLE", marks.drain or ""
    if holders:
        base = "COMPLETING" if all(_is_ending(job, node.name) for job in holders) else "ALLOCATED"
    flags = ["DRAIN"] if marks.drain is not None else []
    silent_since = marks.killed_s if marks.killed_s is not None else marks.frozen_s
    if marks.down is not None:
        base, reason = "DOWN", marks.down
    elif silent_since is not None and (not holders or time.time() - silent_since >= notice_s):
        base, reason = "DOWN", "not responding"
        flags.append("NOT_RESPONDING")
    return NodeView(
        name=node.name,
        base=base,
        flags=tuple(flags),
        address=node.address,
        labels=node.labels,
        reason=reason,
        jobs=tuple(job.job_id for job in holders),
    )


def way_up(node: str, marks: NodeMarks) -> str:
    """The command by which the node can be used again; empty if it can be."""
    if marks.off:
        return f"tmctl local up {node}"
    if marks.frozen_s is not None:
        return f"tmctl local thaw {node}"
    return f"tmctl resume {node}" if marks.drain is not None else ""


def _holds(job: LocalJob, node: str, marks: NodeMarks) -> bool:
    life = job.life_on(node)
    if life is None:
        return False
    if life.ended_s is None:
        return True
    return marks.killed_s is not None and life.released_s is None and job.runs()


def _is_ending(job: LocalJob, node: str) -> bool:
    life = job.life_on(node)
    return job.cancelled_s is not None or (life is not None and life.released_s is not None)
