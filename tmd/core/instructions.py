"""What the daemon's core asks of its shell. A batch is carried out in order, and Persist must be durable before anything
after it is done."""

from __future__ import annotations

import dataclasses

from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord
from tmd.protocol.agent import AgentDirective, AgentWelcome


@dataclasses.dataclass(frozen=True, slots=True)
class Persist:
    """Write these rows (upsert by key; events are appended) in one transaction."""

    jobs: tuple[JobRecord, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    migrations: tuple[MigrationRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    #: None: unchanged.
    paused: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WelcomeAgent:
    """The agent's hello is accepted; its directives follow."""

    agent_id: str
    welcome: AgentWelcome


@dataclasses.dataclass(frozen=True, slots=True)
class RefuseAgent:
    """Tell the agent why and close the connection; it must not come back. With the proof (the fingerprint of the job's key, and
    which life of the daemon this is) it ends its ranks, too; without it they go on."""

    agent_id: str
    reason: str
    key_fingerprint: str = ""
    generation: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DirectAgent:
    """Send to the agent if it is connected; a later one replaces it."""

    agent_id: str
    directive: AgentDirective


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseNode:
    """The job needs this node no more: give it back to the resource manager."""

    job_id: str
    node: str
    reason: str


Instruction = Persist | WelcomeAgent | RefuseAgent | DirectAgent | ReleaseNode
