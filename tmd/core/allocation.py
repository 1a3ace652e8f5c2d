"""A job as its resource manager sees it, where jobs hold nodes of their own (Slurm): a plain value, told whenever it changes."""

from __future__ import annotations

from typing import Literal

import msgspec

#: unlisted: the resource manager has no job of this name, so its nodes are somebody else's business.
AllocationState = Literal["running", "suspended", "over", "unlisted"]


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What a job holds. A failed query makes no such value: while nothing is said, the last word stands."""

    #: As agents name it: of a job that was requeued with the number of its life behind a dot.
    job_id: str
    state: AllocationState
    nodes: tuple[str, ...] = ()
    #: Where the batch script runs: a job keeps this node until its end. Empty: there is no such node.
    batch_host: str = ""
    #: Why it is over, or suspended, in the resource manager's words.
    reason: str = ""
    #: When its time is up, seconds since the Unix epoch; None: never, or not known.
    ends_s: float | None = None
    #: When the job was preempted: it is being ended, at `ends_s` at the latest. None: it was not, as far as is known.
    preempted_s: float | None = None
    #: The reservation that the job runs in; empty: none.
    reservation: str = ""
    #: Whose job it is, by name.
    user: str = ""
    #: The standby nodes that it asked for; `pooled`: of the pool, when it needs one, else as nodes of its own from its start.
    standby: int = 0
    pooled: bool = False
    #: Those of `nodes` that belong to companion jobs of the same user -> that job's id.
    companions: dict[str, str] = {}

    @property
    def live(self) -> bool:
        """The job has its nodes."""
        return self.state in ("running", "suspended")
