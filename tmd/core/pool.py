"""The pool: standby nodes that the jobs share, as the resource manager sees them (with Slurm a reservation). A plain value, told
whenever it changes, and the book that keeps two jobs from reaching for one node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from tmd.core.job import Job

#: How a node comes into a job. expand: it becomes part of the job itself. companion: of a second job of the same user, whose
#: agent serves the first one.
Way = Literal["expand", "companion"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A failed query makes no such value: while nothing is said, the last word stands."""

    name: str
    way: Way
    #: All of its nodes; and those that are sound and that nobody uses.
    nodes: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    #: Who may take nodes, as far as people are named one by one; empty: the resource manager decides when it is asked.
    users: tuple[str, ...] = ()
    #: Why it gives nothing now, for people; empty: it gives what is free.
    problem: str = ""
    #: A job whose standby was used gets another one at once.
    refill: bool = True
    #: How many of its nodes one job may hold at a time.
    nodes_per_job: int = 4


@dataclasses.dataclass(slots=True)
class PoolBook:
    """What the jobs of one daemon know of the pool. `word` None: there is none, or nothing was said of it yet."""

    jobs: Mapping[str, Job]
    word: Pool | None = None

    def free(self, job: Job) -> list[str]:
        """Nodes that this job may reach for: no other job does, and none has got them since the pool was looked at."""
        if self.word is None:
            return []
        taken = set(job.allocation.nodes) if job.allocation is not None else set()
        for other in self.jobs.values():
            if other is not job and not other.over:
                taken |= set(other.growth.nodes) if other.growth.order_id else set()
                taken |= set(other.allocation.nodes) if other.allocation is not None else set()
        return [node for node in self.word.free if node not in taken]
