"""The daemon's state machine. Contract: every public method is one event at time `now` (seconds since the Unix epoch); it
changes the state and returns instructions for the shell, in order. Nothing here blocks or does I/O, and nothing raises on
bad input from outside: `Refused` is the one exception, for operators, with a message for them.

This module takes events to the jobs that they are about. What a job then does is decided in reconcile.py.
"""

from __future__ import annotations

from collections.abc import Collection

from tmd.core import (
    agents,
    directives,
    forming,
    holding,
    intake,
    invariants,
    node_states,
    releasing,
    requests,
    restore,
    show,
    upkeep,
)
from tmd.core.allocation import Allocation
from tmd.core.ending import EXIT_CANCELLED, fail_job
from tmd.core.health import HealthBook
from tmd.core.health_policy import HealthSettings, Policy
from tmd.core.instructions import DirectAgent, Instruction, RefuseAgent, WelcomeAgent
from tmd.core.job import Job
from tmd.core.journal import Journal
from tmd.core.maintenance import Maintenance, MaintenanceBook
from tmd.core.pool import Pool, PoolBook
from tmd.core.reconcile import reconcile
from tmd.core.records import LedgerSnapshot, MigrationRecord, NodeState
from tmd.core.requests import Refused
from tmd.core.settings import CoreSettings
from tmd.core.views import FindingView, JobView, MigrationView, NodeView, RankView
from tmd.protocol.agent import AgentHello, AgentStatus, AgentWelcome
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.handoff import HandoffTerms
from tmd.protocol.health import HealthReport
from tmd.protocol.keys import fingerprint

__all__ = ["DaemonCore", "Refused"]

#: Agents of a job that runs under another ledger come again much more often than this.
STRANGER_KEPT_S = 60.0


class DaemonCore:
    """All jobs of this daemon."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        generation: int,
        snapshot: LedgerSnapshot | None = None,
        agents_hold_nodes: bool = False,
        health: HealthSettings | None = None,
        handoff: HandoffTerms | None = None,
    ) -> None:
        """`agents_hold_nodes`: the resource manager says what each job holds (see `allocation`), and agents of the job change
        it; else nodes are given back to it by ReleaseNode. Raises BadPattern for health settings that were not checked."""
        snapshot = snapshot or LedgerSnapshot()
        self._settings = settings
        self._handoff = handoff or HandoffTerms()
        self._journal = Journal(snapshot.last_event_id)
        self._sequence = directives.Sequence(generation)
        self._paused = snapshot.paused
        self._jobs = {record.job_id: restore.restore_job(record, snapshot, settings, self._journal) for record in snapshot.jobs}
        self._agents_hold_nodes = agents_hold_nodes
        self._pool = PoolBook(self._jobs)
        for job in self._jobs.values():
            job.agents_hold_nodes, job.pool = agents_hold_nodes, self._pool
        #: Agent -> its job.
        self._job_of = {agent_id: job for job in self._jobs.values() for agent_id in job.agents}
        #: Jobs whose agents come although they run under another ledger: what is said of them, and when they came last.
        self._strangers: dict[str, tuple[str, float]] = {}
        #: The resource manager's word, by node.
        self._node_states: dict[str, tuple[NodeState, str]] = {}
        self._health = HealthBook(Policy(health or HealthSettings()), self._journal, observe_only=settings.observe_only)
        self._maintenance = MaintenanceBook(settings.maintenance_lead_s)
        #: Jobs from the ledger whose deadlines do not count yet: no event has told the time.
        self._restored = list(self._jobs.values())

    @property
    def paused(self) -> bool:
        return self._paused

    # ---------------------------------------------------------------- agents

    def agent_hello(self, now: float, hello: AgentHello, job_key: bytes) -> list[Instruction]:
        """Idempotent: an agent that reconnects says hello again. `job_key` is used if the job is new (made by the shell)."""
        self._begin(now)
        reason = agents.misfit(hello)
        if reason is not None:
            return self._refuse(now, hello, reason)
        job = self._jobs.get(hello.job_id)
        reason = agents.other_ledger(job, hello, self._sequence.generation)
        if reason is not None:
            return self._turn_away(now, hello, reason)
        if job is None and hello.job_id in self._strangers:
            return self._refuse(now, hello, self._strangers[hello.job_id][0])
        if job is None:
            job = Job(agents.new_job(now, hello, job_key), self._settings, self._journal)
            job.agents_hold_nodes, job.pool = self._agents_hold_nodes, self._pool
        reason = agents.fence_reason(job, hello) or agents.difference(job.record, hello) or agents.crowded_out(job, hello, now)
        if reason is not None:
            return self._refuse(now, hello, reason, job)
        return self._admit(now, job, hello)

    def agent_status(self, now: float, status: AgentStatus) -> list[Instruction]:
        """An agent says how its processes do. A status that is not newer than the last one changes nothing."""
        self._begin(now)
        job = self._job_of.get(status.agent_id)
        if job is None:
            return []
        agent = job.agents[status.agent_id]
        if agent.fenced:
            return [self._refusal(agent.agent_id, agent.fenced, job)]
        if not intake.take_status(job, now, agent, status):
            return []
        return self._carry_on(now, job)

    def agent_gone(self, now: float, agent_id: str) -> list[Instruction]:
        """Its connection closed."""
        self._begin(now)
        job = self._job_of.get(agent_id)
        if job is None or not job.agents[agent_id].connected:
            return []
        agent = job.agents[agent_id]
        agent.connected = agent.reported = False
        agent.gone_s = now
        if agent.serves and not job.over:
            job.tell(now, agent.node, "disconnected", f"the connection of {agent.node}'s agent closed")
        return self._carry_on(now, job)

    # ---------------------------------------------------------------- resource manager

    def node_state(self, now: float, node: str, state: NodeState, reason: str) -> list[Instruction]:
        """draining starts planned migrations, down means its ranks are lost, up ends a drain that has not flipped, unknown
        ends none: nobody has said so."""
        self._begin(now)
        if state == "unknown" and self._node_states.get(node, ("", ""))[0] in requests.DRAINED_STATES:
            return []
        self._node_states[node] = (state, reason)
        touched = []
        for job in self._jobs.values():
            if node not in job.nodes or job.over:
                continue
            if node_states.change(job, now, node, *self._maintenance.state(now, job, node, state, reason)):
                touched.append(job)
        return self._carry_on(now, *touched)

    def maintenance(self, now: float, announced: Collection[Maintenance]) -> list[Instruction]:
        """All the maintenance that the resource manager has announced by now. Nodes that it comes near are left."""
        self._begin(now)
        self._maintenance.take(announced, self._jobs.values())
        return self._carry_on(now, *self._jobs.values())

    def allocation(self, now: float, word: Allocation) -> list[Instruction]:
        """What a job holds by the resource manager's word. Nodes without an agent get one, nodes that are given back leave it; a
        job whose allocation has ended is over."""
        self._begin(now)
        job = self._jobs.get(word.job_id)
        if job is None:
            return []
        holding.take(job, now, word, self._node_states)
        return self._carry_on(now, job)

    def pool(self, now: float, word: Pool) -> list[Instruction]:
        """What the pool of standby nodes has by the resource manager's word. Jobs that need a node of it take one."""
        self._begin(now)
        self._pool.word = word
        return self._carry_on(now, *(job for job in self._jobs.values() if not job.over))

    # ---------------------------------------------------------------- health

    def health_report(self, now: float, node: str, report: HealthReport) -> list[Instruction]:
        """All that a node's own checks find wrong with it at this time."""
        self._begin(now)
        self._health.take(now, node, report)
        return self._carry_on(now)

    def drains_wanted(self) -> dict[str, str]:
        """Nodes that are to be drained by now because of what their checks found, with the reason."""
        training = {
            node for job in self._jobs.values() if not job.over for node, use in job.nodes.items() if use.use == "training"
        }
        return self._health.wanted(training.__contains__)

    def health_drained(self, now: float, node: str, reason: str) -> list[Instruction]:
        """What drains_wanted asked for was done."""
        self._begin(now)
        self._health.drained(now, node, reason)
        return self._carry_on(now)

    def findings(self) -> list[FindingView]:
        return self._health.views()

    # ---------------------------------------------------------------- operators

    def request_migration(
        self, now: float, job_id: str, *, node: str | None = None, rank: int | None = None, to_node: str | None = None, who: str
    ) -> tuple[str, list[Instruction]]:
        """Returns the migration's id. Raises Refused."""
        self._begin(now)
        job = self._existing_job(job_id)
        move = requests.check(job, now, node=node, rank=rank, to_node=to_node)
        migration_id = requests.create(job, now, move, f"operator {who}")
        return migration_id, self._carry_on(now, job)

    def explain_migration(
        self, now: float, job_id: str, *, node: str | None = None, rank: int | None = None, to_node: str | None = None
    ) -> str:
        """What request_migration would do, in words (--dry-run). Raises Refused."""
        job = self._existing_job(job_id)
        move = requests.check(job, now, node=node, rank=rank, to_node=to_node)
        return requests.explain(job, now, move, paused=self._paused)

    def abort_migration(self, now: float, migration_id: str, who: str) -> list[Instruction]:
        """Raises Refused for one that is unknown, over or past its flip."""
        self._begin(now)
        job, migration = self._existing_migration(migration_id)
        requests.abort(job, now, migration, f"called off by {who}")
        return self._carry_on(now, job)

    def cancel_job(self, now: float, job_id: str, who: str) -> list[Instruction]:
        """Raises Refused for one that is unknown or over."""
        self._begin(now)
        job = self._existing_job(job_id)
        if job.over:
            raise Refused(f"job {job_id} has ended already ({job.record.state}: {job.record.reason})")
        fail_job(job, now, EXIT_CANCELLED, f"cancelled by {who}")
        return self._carry_on(now, job)

    def set_paused(self, now: float, paused: bool, who: str) -> list[Instruction]:
        """Paused: nothing planned begins (it queues); recoveries still happen."""
        self._begin(now)
        if paused != self._paused:
            self._paused = paused
            self._journal.keep_paused(paused)
            verb = "paused" if paused else "resumed"
            self._journal.tell(now, job_id="", subject="tmd", kind=verb, text=f"tmd was {verb} by {who}")
        return self._carry_on(now, *self._jobs.values())

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> list[Instruction]:
        """Acts on every deadline that has passed and reconciles every job."""
        self._begin(now)
        return self._carry_on(now, *self._jobs.values())

    def held_up(self, now: float, seconds: float) -> None:
        """The daemon itself has heard and done nothing for so long: nobody's silence in that time counts. To be told before any
        event that has waited meanwhile; asks for nothing."""
        self._begin(now)
        for job in self._jobs.values():
            upkeep.excuse_silence(job, now, seconds)

    def next_deadline(self) -> float | None:
        """When tick is wanted at the latest. A restarted daemon wants one at once, to learn the time."""
        if self._restored:
            return 0.0
        return min((job.wake_s for job in self._jobs.values() if job.wake_s is not None), default=None)

    # ---------------------------------------------------------------- tests

    def validate(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold (tests, simulator)."""
        for job in self._jobs.values():
            invariants.check(job)

    # ---------------------------------------------------------------- views

    def sentences(self) -> dict[str, str]:
        """What each object does or waits for, one human sentence each: job, migration, node and standby ids."""
        told = {subject: text for job in self._jobs.values() for subject, text in show.sentences(job).items()}
        return told | {job_id: text for job_id, (text, _) in self._strangers.items()}

    def jobs(self) -> list[JobView]:
        return [show.job(job) for job in self._jobs.values()]

    def job(self, job_id: str) -> JobView | None:
        return show.job(self._jobs[job_id]) if job_id in self._jobs else None

    def stranger(self, job_id: str) -> str | None:
        """What is to be said of a job whose agents come although it runs under another ledger."""
        return self._strangers[job_id][0] if job_id in self._strangers else None

    def nodes(self) -> list[NodeView]:
        return [view for job in self._jobs.values() for view in show.nodes(job)]

    def standbys(self) -> list[RankView]:
        return [view for job in self._jobs.values() for view in show.standbys(job)]

    def migrations(self) -> list[MigrationView]:
        """Those of this daemon's life and those that were open when it started; older ones are in the ledger."""
        return [view for job in self._jobs.values() for view in show.migrations(job)]

    # ---------------------------------------------------------------- within

    def _begin(self, now: float) -> None:
        """The first event tells a restarted daemon the time. Of strangers that come no more nothing is said."""
        for job_id in [job_id for job_id, (_, seen_s) in self._strangers.items() if now - seen_s >= STRANGER_KEPT_S]:
            del self._strangers[job_id]
        for job in self._restored:
            restore.begin(job, now)
        self._restored.clear()

    def _admit(self, now: float, job: Job, hello: AgentHello) -> list[Instruction]:
        """The agent's place in the job, a welcome, and what it is to do."""
        newcomer = hello.agent_id not in job.agents
        if job.job_id not in self._jobs:
            self._jobs[job.job_id] = job
            job.evolve(now)
            job.tell(now, job.job_id, "job", f"job {job.job_id}: {job.record.nnodes} nodes of {job.record.nproc_per_node} ranks")
        if newcomer:
            intake.supersede(job, now, hello)
        agent = agents.admit(job, now, hello)
        self._job_of[agent.agent_id] = job
        self._note_node_state(now, job, hello.node, newcomer)
        reason = forming.place(job, now, agent, hello.node_index) if newcomer else None
        if reason is not None:
            agent.fenced = f"node {hello.node} cannot take part in job {job.job_id}: {reason}"
            job.set_node(now, hello.node, use="released", reason=reason)
            return [*self._carry_on(now, job), self._refusal(agent.agent_id, agent.fenced, job)]
        welcome = AgentWelcome(
            protocol=PROTOCOL,
            generation=self._sequence.generation,
            heartbeat_s=self._settings.heartbeat_s,
            hold_limit_s=self._settings.hold_limit_s,
            job_key=job.record.job_key,
            observe_only=self._settings.observe_only,
            handoff=self._handoff,
        )
        return self._carry_on(now, job, greeting=WelcomeAgent(agent.agent_id, welcome))

    def _note_node_state(self, now: float, job: Job, node: str, newcomer: bool) -> None:
        """A node whose agent says hello is not down, whatever was said before."""
        state, reason = self._node_states.get(node, (job.node_state(node), job.nodes[node].reason))
        if newcomer and state == "down":
            state, reason = "unknown", ""
            self._node_states.pop(node, None)
        state, reason = self._maintenance.state(now, job, node, state, reason)
        job.set_node(now, node, state=state, reason=reason)

    def _refuse(self, now: float, hello: AgentHello, reason: str, job: Job | None = None) -> list[Instruction]:
        self._journal.tell(now, job_id=hello.job_id, subject=hello.node, kind="refused", text=reason)
        persist = self._journal.take()
        return [*([persist] if persist is not None else []), self._refusal(hello.agent_id, reason, job)]

    def _refusal(self, agent_id: str, reason: str, job: Job | None) -> RefuseAgent:
        """With the proof that this daemon may end the job's ranks, if it may."""
        proof = fingerprint(job.record.job_key) if job is not None else ""
        return RefuseAgent(agent_id, reason, proof, self._sequence.generation)

    def _turn_away(self, now: float, hello: AgentHello, reason: str) -> list[Instruction]:
        """It will come again every few seconds, so this is told once."""
        known = hello.job_id in self._strangers
        self._strangers[hello.job_id] = (reason, now)
        return [self._refusal(hello.agent_id, reason, None)] if known else self._refuse(now, hello, reason)

    def _existing_job(self, job_id: str) -> Job:
        job = self._jobs.get(job_id)
        if job is None:
            raise Refused(f"there is no job {job_id}; tmctl jobs lists {', '.join(sorted(self._jobs)) or 'none at the moment'}")
        return job

    def _existing_migration(self, migration_id: str) -> tuple[Job, MigrationRecord]:
        for job in self._jobs.values():
            if migration_id in job.migrations:
                return job, job.migrations[migration_id]
        raise Refused(f"there is no migration {migration_id}; tmctl migrations lists them")

    def _suspects_itself(self, now: float) -> bool:
        """More than half of all agents, and at least two, are silent: the fault may be on this side. Half the time that silence
        may last is enough to count, because agents do not fall silent at the very same moment."""
        everybody = [agent for job in self._jobs.values() if not job.over for agent in job.agents.values() if agent.serves]
        patience_s = self._settings.heartbeat_timeout_s / 2
        silent = [agent for agent in everybody if not agent.connected or now - agent.heard_s >= patience_s]
        return len(silent) >= 2 and 2 * len(silent) > len(everybody)

    def _carry_on(self, now: float, *jobs: Job, greeting: WelcomeAgent | None = None) -> list[Instruction]:
        """Reconciles, and orders what follows: written first, then said."""
        directed: list[Instruction] = []
        released: list[Instruction] = []
        for job in jobs:
            self._maintenance.apply(now, job, self._node_states)
            reconcile(job, now, paused=self._paused, suspects_itself=lambda: self._suspects_itself(now))
            self._maintenance.wake(now, job)
            directed += [DirectAgent(agent_id, order) for agent_id, order in directives.for_agents(job, now, self._sequence)]
            released += releasing.by_manager(job)
        persist = self._journal.take()
        return [
            *([persist] if persist is not None else []),
            *([greeting] if greeting is not None else []),
            *directed,
            *released,
        ]
