"""One life of the daemon around the real DaemonCore, and the ledger that outlives it.

Contract: a batch of instructions is carried out in order; Persist is durable before the next one; a crash may come before any
of them. A life that has crashed hears nothing and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulator.engine import Actor
from tmd.core.instructions import DirectAgent, Instruction, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.records import JobRecord, LedgerSnapshot, MigrationRecord, NodeRecord, RankRecord
from tmd.protocol.agent import AgentHello, AgentStatus

if TYPE_CHECKING:
    from tests.simulator.agent import SimAgent
    from tests.simulator.world import World


class SimLedger:
    """Rows by key, as the database keeps them."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.ranks: dict[tuple[str, str], RankRecord] = {}
        self.nodes: dict[tuple[str, str], NodeRecord] = {}
        self.migrations: dict[str, MigrationRecord] = {}
        self.last_event_id = 0
        self.paused = False
        self.generation = 0

    def write(self, rows: Persist) -> None:
        for job in rows.jobs:
            self.jobs[job.job_id] = job
        for rank in rows.ranks:
            self.ranks[rank.job_id, rank.incarnation] = rank
        for node in rows.nodes:
            self.nodes[node.job_id, node.node] = node
        for migration in rows.migrations:
            self.migrations[migration.migration_id] = migration
        for event in rows.events:
            self.last_event_id = max(self.last_event_id, event.event_id)
        if rows.paused is not None:
            self.paused = rows.paused

    def snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(
            jobs=tuple(self.jobs.values()),
            ranks=tuple(self.ranks.values()),
            nodes=tuple(self.nodes.values()),
            migrations=tuple(self.migrations.values()),
            last_event_id=self.last_event_id,
            paused=self.paused,
        )


class SimDaemon(Actor):
    """See the module's contract."""

    def __init__(self, world: World) -> None:
        world.ledger.generation += 1
        super().__init__(world.head, f"daemon-{world.ledger.generation}")
        self.world = world
        self.life = world.ledger.generation
        snapshot = world.ledger.snapshot() if self.life > 1 else None
        self.core = world.cores.daemon(
            world.settings, generation=self.life, snapshot=snapshot, agents_hold_nodes=world.agents_hold_nodes
        )
        #: Instructions until a planned crash; None: no crash is planned.
        self.crash_after: int | None = None
        self._agents: dict[str, SimAgent] = {}
        self._gone: set[str] = set()
        self._alarm_s = float("inf")
        world.after(0.0, self, self._tick)

    # ---------------------------------------------------------------- events

    def hello(self, agent: SimAgent, hello: AgentHello) -> None:
        if agent.agent_id not in self._gone:
            self._agents[agent.agent_id] = agent
            self.carry_out(self.core.agent_hello(self.world.now, hello, b"key"))

    def status(self, agent: SimAgent, status: AgentStatus) -> None:
        if agent.agent_id in self._agents and agent.agent_id not in self._gone:
            self.carry_out(self.core.agent_status(self.world.now, status))

    def gone(self, agent_id: str) -> None:
        self._gone.add(agent_id)
        self._agents.pop(agent_id, None)
        self.carry_out(self.core.agent_gone(self.world.now, agent_id))

    def gone_for_now(self, agent: SimAgent) -> None:
        """The connection breaks; the agent notices as well and comes back."""
        if self._agents.pop(agent.agent_id, None) is not None:
            self.carry_out(self.core.agent_gone(self.world.now, agent.agent_id))
            self.world.after(self.world.pace("channel"), agent, agent.connection_lost)

    def _tick(self) -> None:
        self.world.after(self.world.settings.heartbeat_s, self, self._tick)
        self.carry_out(self.core.tick(self.world.now))

    def _alarm(self) -> None:
        self._alarm_s = float("inf")
        self.carry_out(self.core.tick(self.world.now))

    # ---------------------------------------------------------------- instructions

    def carry_out(self, out: list[Instruction]) -> None:
        for instruction in self.world.cores.order_of(out):
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.crash()
                    return
            self._carry_out_one(instruction)
        self.core.validate()
        deadline_s = self.core.next_deadline()
        if deadline_s is not None and deadline_s < self._alarm_s - 1e-9:
            self._alarm_s = max(deadline_s, self.world.now)
            self.world.after(self._alarm_s - self.world.now + 1e-6, self, self._alarm)

    def _carry_out_one(self, instruction: Instruction) -> None:
        world = self.world
        if isinstance(instruction, Persist):
            world.ledger.write(instruction)
            world.checks.persisted(instruction)
        elif isinstance(instruction, WelcomeAgent):
            self._send(instruction.agent_id, "welcome", self.life, instruction.welcome)
        elif isinstance(instruction, RefuseAgent):
            self._send(instruction.agent_id, "refuse", instruction.reason)
        elif isinstance(instruction, DirectAgent):
            agent = self._agents.get(instruction.agent_id)
            if agent is not None:
                world.checks.directed(agent.agent_id, agent.machine.name, instruction.directive)
            self._send(instruction.agent_id, "directed", instruction.directive)
        elif isinstance(instruction, ReleaseNode):
            world.note(self.name, f"releases {instruction.node}: {instruction.reason}")
            if world.slurm is not None and world.slurm.pool is not None:
                world.slurm.pool.end_companion(instruction.job_id, instruction.node)
            else:
                world.checks.released(instruction.node)

    def _send(self, agent_id: str, message: str, *args: Any) -> None:
        agent = self._agents.get(agent_id)
        if agent is not None:
            self.world.transmit(agent.machine, agent, getattr(agent, message), *args)

    def crash(self) -> None:
        self.alive = False
        self.world.note(self.name, "is killed")
        for agent in self._agents.values():
            self.world.after(self.world.pace("channel"), agent, agent.connection_lost)
