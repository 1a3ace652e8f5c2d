"""What the core keeps in the ledger, as plain values: the whole of it is enough to go on after a crash."""

from __future__ import annotations

from typing import Literal

import msgspec

from tmd.protocol.handoff import HandoffReport
from tmd.protocol.membership import Membership, Plan, Resolution

JobState = Literal["forming", "installing", "running", "recovering", "restarting", "finishing", "done", "failed"]
MigrationState = Literal["queued", "selecting", "preparing", "installing", "armed", "copying", "done", "aborted", "failed"]
MigrationKind = Literal["planned", "unplanned"]
NodeState = Literal["up", "draining", "drained", "down", "unknown"]
#: The six phases, in order.
PHASES = ("detect", "select", "prepare", "install", "copy", "first_step")


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One job: who owns it, its shape, and everything that decides which epoch and step its ranks may run."""

    job_id: str
    state: JobState
    nnodes: int
    nproc_per_node: int
    world_size: int
    owner_uid: int
    job_key: bytes
    #: The epoch that runs or ran last.
    epoch: int = -1
    #: No epoch above this one was ever given out: the next is one more.
    epoch_limit: int = -1
    poison_epoch: int = -1
    table: Membership | None = None
    resolution: Resolution | None = None
    plan: Plan | None = None
    armed: bool = False
    plan_counter: int = 0
    incarnation_counter: int = 0
    restarts: int = 0
    versions: dict[str, str] = {}
    script_digest: str = ""
    command: tuple[str, ...] = ()
    #: Why a result is only approximately that of an undisturbed run, one line each; empty: bit-identical.
    approximations: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None
    #: How many steps were committed, once the job has ended.
    steps: int | None = None
    created_s: float = 0.0
    updated_s: float = 0.0


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation: member, standby or gone."""

    job_id: str
    incarnation: str
    node: str
    agent_id: str
    local_rank: int
    rank: int | None
    state: Literal["starting", "standby", "member", "leaver", "joiner", "lost", "retired", "refused", "exited"]
    reason: str = ""
    updated_s: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node as one job uses it. `taken` until tmd has given it back."""

    node: str
    job_id: str
    state: NodeState
    #: What the node is for in this job.
    use: Literal["training", "standby", "released", "lost"]
    labels: dict[str, str] = {}
    agent_id: str = ""
    reason: str = ""
    #: Where it was taken from, if the job did not have it from its start; empty: it had.
    origin: str = ""
    updated_s: float = 0.0


class MigrationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One replacement, planned or unplanned, of one rank or of several at once; with what it cost."""

    migration_id: str
    job_id: str
    kind: MigrationKind
    state: MigrationState
    #: Rank -> leaving incarnation, and rank -> joiner (empty until selected).
    leavers: dict[int, str]
    joiners: dict[int, str] = {}
    from_nodes: tuple[str, ...] = ()
    to_nodes: tuple[str, ...] = ()
    plan_id: int = 0
    #: Who or what asked for it: "operator root", "drain of n2: reason", "rank 3 exited with signal 9".
    trigger: str = ""
    reason: str = ""
    #: Seconds spent in each of PHASES.
    phases_s: dict[str, float] = {}
    downtime_s: float | None = None
    downtime_steps: float | None = None
    lost_time_s: float | None = None
    normal_step_s: float | None = None
    steps_redone: int = 0
    stayer_links_reopened: int = 0
    bytes_moved: int = 0
    record_origin: str = ""
    #: Rank -> how its state came to the joiner; None: not known (yet).
    handoffs: dict[int, HandoffReport] | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    attempt: int = 1


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the append-only log. `cause` is the event that led to this one, 0 for none."""

    event_id: int
    cause: int
    time_s: float
    job_id: str
    #: What it is about: a job, migration, incarnation or node id.
    subject: str
    kind: str
    text: str


class LedgerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted daemon reads. Jobs that have ended may be left out."""

    jobs: tuple[JobRecord, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    migrations: tuple[MigrationRecord, ...] = ()
    last_event_id: int = 0
    paused: bool = False
