"""What the daemon shows of itself (API, tmctl): the records plus what is known live. Read-only values; times are seconds."""

from __future__ import annotations

import msgspec

from tmd.core.health_policy import Action
from tmd.core.records import JobRecord, MigrationRecord, NodeRecord, NodeState, RankRecord
from tmd.protocol.health import Finding


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation: member, standby or gone."""

    record: RankRecord
    #: "starting" ... "failed" as in tmd.protocol.rank.Phase; "" before the process has reported.
    phase: str = ""
    #: The agent's word on the process: "starting", "running", "exiting", "exited"; "" if not known.
    process: str = ""
    exit_code: int | None = None
    pid: int = 0
    host: str = ""
    port: int = 0
    #: False while the agent of its node is not connected: everything here is then the last that was heard.
    connected: bool = False
    last_heard_s: float = 0.0
    run_epoch: int = -1
    live_epoch: int = -1
    next_step: int = 0
    counters: dict[str, int] = {}
    sentence: str = ""


class MigrationView(msgspec.Struct, frozen=True, kw_only=True):
    """One migration. `sentence`: what it waits for, empty once it has ended."""

    record: MigrationRecord
    sentence: str = ""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job with its members, standbys, nodes and open migrations."""

    record: JobRecord
    #: The members by rank.
    ranks: tuple[RankView, ...] = ()
    standbys: tuple[RankView, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    #: Migrations of this job that have not ended.
    migrations: tuple[MigrationView, ...] = ()
    #: The step that is to be committed next, as far as the daemon has heard; of a job that has ended the number of its steps,
    #: None if that was not written down.
    next_step: int | None = None
    #: Median duration of the last undisturbed steps, None before there are enough.
    normal_step_s: float | None = None
    last_commit_s: float | None = None
    sentence: str = ""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node of one job, as the job uses it."""

    record: NodeRecord
    #: The resource manager's word, for all jobs.
    state: NodeState = "unknown"
    connected: bool = False
    last_heard_s: float = 0.0
    #: Ranks of the job that live there now, and the number of standby processes that are ready.
    ranks: tuple[int, ...] = ()
    standbys_ready: int = 0
    standbys: int = 0
    sentence: str = ""


class FindingView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a node, by its last report."""

    node: str
    finding: Finding
    #: When it came this time, and the last report that has it.
    since_s: float
    seen_s: float
    action: Action
    #: It counts: the action is taken, at once or once no ranks train on the node.
    confirmed: bool
    #: It comes and goes.
    flapping: bool
    #: The node has been drained for it.
    acted: bool
