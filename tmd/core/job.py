"""One job's state, and the few ways to change it. Every change is journalled; what to do next is decided elsewhere
(reconcile.py and the modules it calls), by looking at the whole of this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tmd.core.allocation import Allocation
from tmd.core.journal import Journal
from tmd.core.pool import PoolBook
from tmd.core.processes import Agent, Process
from tmd.core.records import JobRecord, MigrationRecord, NodeRecord, NodeState, RankRecord
from tmd.core.settings import CoreSettings
from tmd.core.timings import CommitLog, Window
from tmd.core.under_way import Attempt, Errand, Flight, Recovery
from tmd.protocol.membership import buddy_of, ward_of

#: States in which no step was ever live since the (re)start: everybody starts fresh.
FRESH_STATES = frozenset({"forming", "installing", "restarting"})
OVER_STATES = frozenset({"done", "failed"})
OPEN_MIGRATION_STATES = frozenset({"queued", "selecting", "preparing", "installing", "armed", "copying"})


class Job:
    """See the module's contract. Attributes are read everywhere and written only through the methods here and by the
    transitions in recovery.py, installing.py, proposing.py, planned.py and forming.py."""

    def __init__(self, record: JobRecord, settings: CoreSettings, journal: Journal) -> None:
        self.record = record
        self.settings = settings
        self.journal = journal
        self.agents: dict[str, Agent] = {}
        self.processes: dict[str, Process] = {}
        self._roles: dict[int, str] = {}
        self._holders: dict[int, Process] | None = None
        self.nodes: dict[str, NodeRecord] = {}
        self.migrations: dict[str, MigrationRecord] = {}
        self.recovery: Recovery | None = None
        self.attempt: Attempt | None = None
        #: Failed attempts in a row, and when the next one may start.
        self.failed_attempts = 0
        self.last_failure = ""
        self.retry_at_s = 0.0
        self.flight: Flight | None = None
        #: The step that the last recoveries came to, and how many of them in a row.
        self.broken_step = -1
        self.broken_times = 0
        #: Ranks whose process ended with code 0, and what went wrong with others after the last step.
        self.left: set[int] = set()
        self.lost_at_end: dict[int, str] = {}
        self.windows: dict[str, Window] = {}
        self.commits = CommitLog()
        #: When the daemon last heard of a new committed step.
        self.progress_s = 0.0
        self.live_since_s = 0.0
        #: When many agents were silent at once, and when all were, for the last time.
        self.doubted_s = float("-inf")
        #: Agents whose silence was told of although nothing is done about it.
        self.said_silent: set[str] = set()
        self.all_away_s = float("-inf")
        #: Since when a role has been without a holder, None if every one has one.
        self.vacant_since_s: float | None = None
        #: How often the ranks of a position were started again before the job had started.
        self.refills: dict[int, int] = {}
        self.finishing_since_s = 0.0
        #: Nothing is decided before: agents are reconnecting to a restarted daemon. None: decided long ago.
        self.settling_until_s: float | None = None
        #: Nodes whose drain an operator has overruled, and the number of the last attempt to empty a node.
        self.drains_held: set[str] = set()
        self.drain_attempts: dict[str, int] = {}
        self.drained_since_s: dict[str, float] = {}
        #: Since when a migration looks for standbys.
        self.selecting_since_s: dict[str, float] = {}
        #: Migration -> the node it must go to, and standbys that failed it.
        self.wanted_node: dict[str, str] = {}
        self.failed_joiners: dict[str, set[str]] = {}
        self.sentence = ""
        self.migration_sentences: dict[str, str] = {}
        self.node_sentences: dict[str, str] = {}
        #: Directives must be built again.
        self.stale = True
        #: Nodes to be released once nothing of the job runs there, with the reason.
        self.leaving_nodes: dict[str, str] = {}
        #: Nodes that an earlier life of the daemon gave back or up, until it is known whether it has taken them again.
        self.left_before: set[str] = set()
        #: The resource manager's word on what the job holds; None: it has none, or has not spoken in this life of the daemon.
        self.allocation: Allocation | None = None
        #: The resource manager knows what jobs hold, and their agents change it.
        self.agents_hold_nodes = False
        #: Nodes of the allocation that need an agent; and the nodes that are to be given back.
        self.launches: dict[str, Errand] = {}
        self.shrink = Errand()
        #: The pool that the jobs share; and the node that this one takes from it.
        self.pool: PoolBook | None = None
        self.growth = Errand()
        self.growth_sentence = ""
        #: Nodes that have come from it, and when, until their agents speak; since when there has been one too many.
        self.grown_s: dict[str, float] = {}
        #: Companion jobs that the resource manager was told to end.
        self.ended_companions: set[str] = set()
        self.superfluous_since_s: float | None = None
        #: Agent -> orders that it is to carry out no more, and since when.
        self.withdrawn: dict[str, dict[str, float]] = {}
        #: Since when, or until when last, the silence of a suspended job has been excused; None: it was not suspended.
        self.suspended_seen_s: float | None = None
        self.wake_s: float | None = None
        self._said: set[str] = set()

    # ---------------------------------------------------------------- look-ups

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def over(self) -> bool:
        return self.record.state in OVER_STATES

    @property
    def fresh(self) -> bool:
        return self.record.state in FRESH_STATES

    @property
    def called_off(self) -> bool:
        """The epoch that ran last is poisoned."""
        return self.record.poison_epoch >= self.record.epoch

    @property
    def ranks(self) -> range:
        return range(self.record.world_size)

    @property
    def roles(self) -> Mapping[int, str]:
        """Rank -> incarnation that holds the role or is to take it next; a vacant role is missing."""
        return self._roles

    def holder(self, rank: int) -> Process | None:
        return self.holders().get(rank)

    def holders(self) -> dict[int, Process]:
        """Rank -> process, in order of rank, for the roles that are not vacant. The same object until a role changes hands."""
        if self._holders is None:
            self._holders = {rank: self.processes[incarnation] for rank, incarnation in sorted(self._roles.items())}
        return self._holders

    def vacant(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._roles]

    def active(self) -> list[Process]:
        return [process for process in self.processes.values() if process.active]

    def agent_on(self, node: str) -> Agent | None:
        """The agent that serves this node now."""
        return next((agent for agent in self.agents.values() if agent.node == node and agent.serves), None)

    def node_state(self, node: str) -> NodeState:
        return self.nodes[node].state if node in self.nodes else "unknown"

    def holds(self, node: str) -> bool:
        """By the resource manager's word the node is the job's."""
        return self.allocation is not None and self.allocation.live and node in self.allocation.nodes

    def has_lost(self, node: str) -> bool:
        """By the resource manager's word the job has nodes, and this is none of them."""
        return self.allocation is not None and self.allocation.live and node not in self.allocation.nodes

    def companion_of(self, node: str) -> str:
        """The companion job that this node belongs to; empty: it is the job's own."""
        return self.allocation.companions.get(node, "") if self.allocation is not None else ""

    def is_companion(self, node: str) -> bool:
        return bool(self.companion_of(node))

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, process in self.holders().items() if process.node == node]

    def buddy(self, rank: int) -> int:
        return buddy_of(rank, self.record.world_size, self.record.nproc_per_node)

    def ward(self, rank: int) -> int:
        return ward_of(rank, self.record.world_size, self.record.nproc_per_node)

    def open_migrations(self) -> list[MigrationRecord]:
        return [migration for migration in self.migrations.values() if migration.state in OPEN_MIGRATION_STATES]

    def flying(self) -> MigrationRecord | None:
        """The migration of the outstanding plan."""
        return self.migrations.get(self.record.plan.migration_id) if self.record.plan is not None else None

    def is_connected(self, process: Process) -> bool:
        """Its agent is connected, whether it says anything or not."""
        agent = self.agents.get(process.record.agent_id)
        return agent is not None and agent.connected

    def silence_s(self, process: Process, now: float) -> float:
        """For how long nothing was heard of a process's agent: since its connection closed, or since its last word."""
        agent = self.agents.get(process.record.agent_id)
        if agent is None:
            return now
        return now - (agent.heard_s if agent.connected else agent.gone_s)

    def has_flipped_away(self, process: Process) -> bool:
        """It is a leaver of a plan that has flipped: the steps go on without it."""
        plan, flight, rank = self.record.plan, self.flight, process.record.rank
        if plan is None or flight is None or flight.flipped_s is None or rank is None or self.called_off:
            return False
        return plan.leavers.get(rank) == process.incarnation

    def next_step(self) -> int:
        """The first step that is not committed, as far as was heard."""
        if self.record.steps is not None:
            return self.record.steps
        finished = [process.step_shown for process in self.holders().values() if process.report.phase == "finished"]
        return max(finished or [self.commits.next_step, *(process.step_shown for process in self.holders().values())])

    def name(self, process: Process) -> str:
        """How sentences call an incarnation."""
        rank = process.record.rank
        return f"rank {rank} on {process.node}" if rank is not None else f"standby {process.incarnation} on {process.node}"

    # ---------------------------------------------------------------- changes

    def tell(self, now: float, subject: str, kind: str, text: str, cause: int | None = None) -> int:
        return self.journal.tell(now, job_id=self.job_id, subject=subject, kind=kind, text=text, cause=cause)

    def say_once(self, now: float, subject: str, key: str, text: str) -> None:
        """A notice that would come with every reconcile otherwise."""
        if key not in self._said:
            self._said.add(key)
            self.tell(now, subject, "notice", text)

    def last_about(self, subject: str) -> int:
        return self.journal.last_about(self.job_id, subject)

    def evolve(self, now: float, **changes: Any) -> None:
        """Changes the job's record."""
        self.record = msgspec.structs.replace(self.record, updated_s=now, **changes)
        self.journal.keep_job(self.record)
        self.stale = True

    def set_process(self, now: float, process: Process, **changes: Any) -> None:
        """Changes an incarnation's record."""
        process.record = msgspec.structs.replace(process.record, updated_s=now, **changes)
        self.journal.keep_rank(process.record)
        self.stale = True

    def give_role(self, rank: int, process: Process) -> None:
        """From now on this incarnation holds the role, or is to take it."""
        self._roles[rank] = process.incarnation
        self._holders = None
        self.stale = True

    def vacate(self, rank: int) -> None:
        """Nobody holds the role."""
        self._roles.pop(rank, None)
        self._holders = None
        self.stale = True

    def set_node(self, now: float, node: str, **changes: Any) -> None:
        """Changes a node's record, which it makes if need be."""
        old = self.nodes.get(node) or NodeRecord(node=node, job_id=self.job_id, state="unknown", use="standby")
        new = msgspec.structs.replace(old, **changes)
        if node in self.nodes and new == old:
            return
        self.nodes[node] = msgspec.structs.replace(new, updated_s=now)
        self.journal.keep_node(self.nodes[node])
        self.stale = True

    def set_migration(self, migration_id: str, **changes: Any) -> MigrationRecord:
        migration = msgspec.structs.replace(self.migrations[migration_id], **changes)
        self.add_migration(migration)
        return migration

    def add_migration(self, migration: MigrationRecord) -> None:
        self.migrations[migration.migration_id] = migration
        self.journal.keep_migration(migration)

    def end_migration(self, now: float, migration_id: str, state: str, reason: str, cause: int | None = None) -> None:
        """Done, aborted or failed, with a reason."""
        self.set_migration(migration_id, state=state, reason=reason, ended_s=now)
        self.tell(now, migration_id, state, reason, cause)
        self.migration_sentences.pop(migration_id, None)
        self.wanted_node.pop(migration_id, None)
        self.selecting_since_s.pop(migration_id, None)
        self.failed_joiners.pop(migration_id, None)
        if state != "done":
            self.windows.pop(migration_id, None)

    def mint(self, now: float, agent: Agent, local_rank: int, rank: int | None) -> Process:
        """A new incarnation on this agent's node; its record is written before the agent hears of it."""
        number = self.record.incarnation_counter + 1
        self.evolve(now, incarnation_counter=number)
        record = RankRecord(
            job_id=self.job_id,
            incarnation=f"{self.job_id}.{number}",
            node=agent.node,
            agent_id=agent.agent_id,
            local_rank=local_rank,
            rank=rank,
            state="standby" if rank is None else "starting",
            updated_s=now,
        )
        process = Process(record, first_rank=rank, heard_s=now)
        self.processes[record.incarnation] = process
        self.set_process(now, process)
        if rank is not None:
            self.give_role(rank, process)
        return process

    def free_slots(self, agent: Agent) -> list[int]:
        """Local ranks of this agent without a living process."""
        taken = {
            process.record.local_rank
            for process in self.processes.values()
            if process.record.agent_id == agent.agent_id and (process.active or process.record.state == "exited")
        }
        return [slot for slot in range(self.record.nproc_per_node) if slot not in taken]

    def retire(self, now: float, process: Process, reason: str, cause: int | None = None) -> None:
        """Its role is another's for good: it is told to leave, and is killed if it does not."""
        process.leave_until_s = now + self.settings.heartbeat_timeout_s
        self.set_process(now, process, state="retired", reason=reason)
        self.tell(now, process.incarnation, "retired", f"{self.name(process)} retired: {reason}", cause)

    def give_back(self, now: float, node: str, reason: str, cause: int) -> None:
        """The job needs the node no more: what runs there is retired; the node is released once it has ended."""
        for process in self.active():
            if process.node == node and process.incarnation not in self._roles.values():
                self.retire(now, process, reason, cause)
        agent = self.agent_on(node)
        if agent is not None:
            agent.released = True
        self.set_node(now, node, use="released", reason=reason)
        self.leaving_nodes[node] = reason
        self.tell(now, node, "released", f"{node} is given back: {reason}", cause)

    def wake_at(self, moment_s: float) -> None:
        """Have `tick` called at this moment at the latest."""
        if self.wake_s is None or moment_s < self.wake_s:
            self.wake_s = moment_s

    def resolved(self) -> bool:
        """The undecided step of the epoch that ran last has been decided, and nobody was told to go since."""
        return self.record.resolution is not None and self.record.resolution.epoch >= self.record.epoch and self.called_off

    def is_vacant_too_long(self, now: float) -> bool:
        """Some role has had no holder for longer than survivors hold. To be asked while one is vacant, and only then."""
        if self.vacant_since_s is None:
            self.vacant_since_s = now
        deadline = self.vacant_since_s + self.settings.hold_limit_s
        self.wake_at(deadline)
        return now >= deadline

    def forget_progress(self) -> None:
        """The job starts again from step 0."""
        self.commits = CommitLog()
        self.windows.clear()
        self.left.clear()
        self.lost_at_end.clear()
        self.refills.clear()
        self.vacant_since_s = None
