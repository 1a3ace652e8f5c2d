"""The daemon's state machine. Contract: every public method is one event at time `now` (seconds since the Unix epoch); it
changes the state and returns instructions for the shell, in order. Nothing here blocks or does I/O, and nothing raises on
bad input from outside: `Refused` is the one exception, for operators, with a message for them."""

from __future__ import annotations

from tmd.core.instructions import Instruction
from tmd.core.records import LedgerSnapshot, NodeState
from tmd.core.settings import CoreSettings
from tmd.core.views import JobView, MigrationView, NodeView, RankView
from tmd.protocol.agent import AgentHello, AgentStatus


class Refused(ValueError):
    """An operator's request that cannot be granted; the text says what, why and what to do."""


class DaemonCore:
    """All jobs of this daemon."""

    def __init__(self, settings: CoreSettings, *, generation: int, snapshot: LedgerSnapshot | None = None) -> None: ...

    # agents
    def agent_hello(self, now: float, hello: AgentHello, job_key: bytes) -> list[Instruction]:
        """Idempotent: an agent that reconnects says hello again. `job_key` is used if the job is new (made by the shell)."""
        raise NotImplementedError

    def agent_status(self, now: float, status: AgentStatus) -> list[Instruction]:
        raise NotImplementedError

    def agent_gone(self, now: float, agent_id: str) -> list[Instruction]:
        """Its connection closed."""
        raise NotImplementedError

    # resource manager
    def node_state(self, now: float, node: str, state: NodeState, reason: str) -> list[Instruction]:
        """draining starts planned migrations, down means its ranks are lost, up ends a drain that has not flipped."""
        raise NotImplementedError

    # operators
    def request_migration(
        self, now: float, job_id: str, *, node: str | None = None, rank: int | None = None, to_node: str | None = None, who: str
    ) -> tuple[str, list[Instruction]]:
        """Returns the migration's id. Raises Refused."""
        raise NotImplementedError

    def explain_migration(
        self, now: float, job_id: str, *, node: str | None = None, rank: int | None = None, to_node: str | None = None
    ) -> str:
        """What request_migration would do, in words (--dry-run). Raises Refused."""
        raise NotImplementedError

    def abort_migration(self, now: float, migration_id: str, who: str) -> list[Instruction]:
        raise NotImplementedError

    def cancel_job(self, now: float, job_id: str, who: str) -> list[Instruction]:
        raise NotImplementedError

    def set_paused(self, now: float, paused: bool, who: str) -> list[Instruction]:
        """Paused: nothing planned begins (it queues); recoveries still happen."""
        raise NotImplementedError

    # time
    def tick(self, now: float) -> list[Instruction]:
        """Acts on every deadline that has passed and reconciles every job."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When tick is wanted at the latest."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold (tests, simulator)."""
        raise NotImplementedError

    # views
    def sentences(self) -> dict[str, str]:
        """What each object does or waits for, one human sentence each: job, migration, node and standby ids."""
        raise NotImplementedError

    def jobs(self) -> list[JobView]:
        raise NotImplementedError

    def job(self, job_id: str) -> JobView | None:
        raise NotImplementedError

    def nodes(self) -> list[NodeView]:
        raise NotImplementedError

    def standbys(self) -> list[RankView]:
        raise NotImplementedError

    def migrations(self) -> list[MigrationView]:
        """Those of this daemon's life and those that were open when it started; older ones are in the ledger."""
        raise NotImplementedError
