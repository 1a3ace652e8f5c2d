"""Maintenance that the resource manager has announced: a node that it comes near is left as a drained one is. Pure.

A job is concerned if it would still be there when the maintenance begins, and is not itself part of it (a job that runs in the
reservation). Whatever else is said of a node goes before: a drain, a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from tmd.core import node_states
from tmd.core.job import Job
from tmd.core.records import NodeState

#: The reason of a node that is left for maintenance begins so.
REASON = "maintenance reservation "


class Maintenance(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation. Times are seconds since the Unix epoch."""

    name: str
    start_s: float
    end_s: float
    nodes: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The same from its announcement to its end."""
        return f"{REASON}{self.name} from {datetime.fromtimestamp(self.start_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


class MaintenanceBook:
    """All that is announced. Nothing is known before the first word; while nothing is said the last word stands."""

    def __init__(self, lead_s: float) -> None:
        self._lead_s = lead_s
        self._announced: tuple[Maintenance, ...] | None = None
        #: Nodes that are named, or are being left for what is named no more: mostly none, and each event looks at them.
        self._nodes: frozenset[str] = frozenset()

    def take(self, announced: Collection[Maintenance], jobs: Iterable[Job]) -> None:
        self._announced = tuple(announced)
        named = {node for each in announced for node in each.nodes}
        left = {node for job in jobs for node, record in job.nodes.items() if record.reason.startswith(REASON)}
        self._nodes = frozenset(named | left)

    def state(self, now: float, job: Job, node: str, state: NodeState, reason: str) -> tuple[NodeState, str]:
        """What a node is to a job, given what it is by itself."""
        known = job.nodes.get(node)
        if state not in ("up", "unknown"):
            return state, reason
        if self._announced is None or job.allocation is None:
            # A restarted daemon knows from the ledger that it has begun to leave the node.
            left = known is not None and known.state == "draining" and known.reason.startswith(REASON)
            return ("draining", known.reason) if left and known is not None else (state, reason)
        due = [each for each in self._of(job, node) if each.start_s - self._lead_s <= now < each.end_s]
        return ("draining", due[0].reason) if due else (state, reason)

    def apply(self, now: float, job: Job, states: Mapping[str, tuple[NodeState, str]]) -> None:
        """Brings a job's nodes up to date; `states`: what is known of nodes by themselves."""
        if self._announced is None or job.over:
            return
        for node in sorted(self._nodes & job.nodes.keys()):
            if job.nodes[node].use != "released":
                node_states.change(job, now, node, *self.state(now, job, node, *states.get(node, ("unknown", ""))))

    def wake(self, now: float, job: Job) -> None:
        """Has the job looked at when the next maintenance comes near, or ends."""
        for node in () if job.over else self._nodes & job.nodes.keys():
            for each in self._of(job, node):
                moments = [moment for moment in (each.start_s - self._lead_s, each.end_s) if moment > now]
                if moments:
                    job.wake_at(min(moments))

    def _of(self, job: Job, node: str) -> Iterator[Maintenance]:
        for each in self._announced or ():
            if node in each.nodes and _concerns(each, job):
                yield each


def _concerns(maintenance: Maintenance, job: Job) -> bool:
    word = job.allocation
    if word is None or word.reservation == maintenance.name:
        return False
    return word.ends_s is None or word.ends_s > maintenance.start_s
