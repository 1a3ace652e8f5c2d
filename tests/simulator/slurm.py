"""The resource manager of a seed in which agents hold the job's nodes, and the commands that agents give it.

Contract: it tells the daemon of every change and repeats itself. A launch fails, hangs, comes late, or comes although its starter
has died; making the job smaller fails, or works without the agent ever saying so; whoever gives a command may be killed in the
middle.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulator.engine import Actor, Machine
from tests.simulator.pool import GROWTHS, NODES, SimPool
from tmd.core.allocation import Allocation
from tmd.protocol.agent import NodeOrder, OrderStatus

if TYPE_CHECKING:
    from tests.simulator.agent import SimAgent
    from tests.simulator.world import World

POLL_S = 0.3
#: A node that nothing disturbs has an agent, or has been given back, after this long, or it is tried again.
CALM_S = 3.5
#: How a command ends, with weights.
LAUNCHES = {"works": 70, "fails": 12, "hangs": 6, "is late": 6, "starter dies": 6}
RELEASES = {"works": 70, "fails": 14, "says nothing": 8, "starter dies": 8}


class SimSlurm(Actor):
    """See the module's contract. Its random numbers are its own, so a seed without it is what it was."""

    def __init__(self, world: World) -> None:
        super().__init__(Machine("slurmctld"), "slurmctld")
        self.world = world
        self.random = random.Random(world.seed + 0.5)
        self.nodes = [machine.name for machine in world.machines]
        self.batch_host = self.nodes[0]
        self.suspended = False
        #: In some seeds only, so that the others stay what they were; it makes machines of its own.
        self.pool = SimPool(self) if world.seed % 2 else None
        self._commands: dict[str, tuple[SimAgent, NodeOrder]] = {}
        #: Since when a node has been as it should not stay.
        self._odd_since_s: dict[str, float] = {}
        world.after(POLL_S, self, self._poll)
        if self.random.random() < 0.4:
            world.after(self._between(0.3, 2.0), self, self._suspend)

    def _between(self, low_s: float, high_s: float) -> float:
        return low_s + (high_s - low_s) * self.random.random()

    def _drawn(self, weights: dict[str, int]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    # ---------------------------------------------------------------- what it says

    def _poll(self) -> None:
        self.world.after(POLL_S, self, self._poll)
        if self.pool is not None:
            self.pool.look()
            self.pool.tell()
        self.tell()
        self._look_for_odd_nodes()

    def tell(self) -> None:
        state = "suspended" if self.suspended else "running"
        word = Allocation(
            job_id=self.world.job_id,
            state=state,  # type: ignore[arg-type]
            nodes=tuple(self.nodes),
            batch_host=self.batch_host,
            standby=self.world.standby_nodes if self.pool is not None else 0,
            companions=dict(self.pool.companions) if self.pool is not None else {},
        )
        self.world.after(self._between(0.001, 0.02), self, self._deliver, word)

    def _deliver(self, word: Allocation) -> None:
        daemon = self.world.daemon
        if daemon.alive:
            daemon.carry_out(daemon.core.allocation(self.world.now, word))

    def cut(self, node: str) -> None:
        """It is down: a job that outlives the loss of nodes does not hold it any more."""
        if node in self.nodes and node != self.batch_host:
            self.nodes.remove(node)
            self.tell()

    # ---------------------------------------------------------------- what agents ask for

    def command(self, agent: SimAgent, order: NodeOrder) -> None:
        """An agent runs a command of the resource manager."""
        self._odd_since_s.update(dict.fromkeys(order.nodes, self.world.now))
        if order.kind == "release":
            self._release(agent, order)
            return
        if order.kind != "launch":
            assert self.pool is not None, "a node is to be taken where there is no pool"
            self.pool.grow(agent, order, self._drawn(GROWTHS))
            return
        how = self._drawn(LAUNCHES)
        self.world.note(self.name, f"{agent.name} launches on {order.nodes[0]}, which {how}")
        self._commands[order.order_id] = (agent, order)
        delay_s = self._between(1.5, 3.0) if how == "is late" else self._between(0.01, 0.1)
        if how == "fails":
            self.world.after(delay_s, self, self.ends, agent, order, "failed", "srun: error: Unable to create step")
        elif how != "hangs":
            self.world.after(delay_s, self, self._launched, agent, order)
        if how == "starter dies":
            self.world.after(self._between(0.0, delay_s), self, self.kill, agent)

    def end_command(self, order_id: str) -> None:
        """The agent ends a launch: the agent that it has started, if any, goes too."""
        agent, order = self._commands.pop(order_id, (None, None))
        if agent is not None and order is not None:
            self.ends(agent, order, "failed", "ended by its agent")

    def _launched(self, agent: SimAgent, order: NodeOrder) -> None:
        if order.order_id not in self._commands or (not agent.alive and self.random.random() < 0.5):
            return
        (node,) = order.nodes
        if node in self.nodes:
            self.world.launch_agent(node)
        else:
            self.ends(agent, order, "failed", f"srun: error: Requested node {node} is not in the job")

    def _release(self, agent: SimAgent, order: NodeOrder) -> None:
        how = self._drawn(RELEASES)
        self.world.note(self.name, f"{agent.name} gives {order.nodes} back, which {how}")
        if how == "starter dies" and self.random.random() < 0.5:
            self.kill(agent)
            return
        if how == "fails":
            self.world.after(self._between(0.01, 0.1), self, self.ends, agent, order, "failed", "slurm_update error: try again")
            return
        self.world.after(self._between(0.01, 0.05), self, self._shrink, order.nodes)
        if how == "works":
            self.world.after(0.1, self, self.ends, agent, order, "done", "")
        elif how == "starter dies":
            self.world.after(0.02, self, self.kill, agent)

    def _shrink(self, nodes: tuple[str, ...]) -> None:
        """What still runs on these nodes is killed."""
        for node in nodes:
            self.world.checks.given_back(node)
            if node in self.nodes:
                self.nodes.remove(node)
            for agent in self.world.agents_on(node):
                self.world.checks.touched(agent.processes.values())
                agent.end()
        self.tell()

    def ends(self, agent: SimAgent, order: NodeOrder, state: str, reason: str) -> None:
        if agent.alive:
            status = OrderStatus(
                order_id=order.order_id,
                kind=order.kind,
                nodes=order.nodes,
                state=state,
                since_s=self.world.now,
                reason=reason,  # type: ignore[arg-type]
            )
            self.world.after(0.001, agent, agent.order_ended, status)

    def kill(self, agent: SimAgent) -> None:
        """The machine of who gave the command loses power, if the job can be expected to outlive that."""
        if agent.alive and self.world.faults.would_survive("kill_node"):
            self.world.note(self.name, f"kills {agent.machine.name} in the middle of its command")
            self.world.checks.touched(agent.processes.values())
            self.world.checks.fault_strikes()
            agent.end()

    # ---------------------------------------------------------------- suspension

    def _suspend(self) -> None:
        world = self.world
        if world.checks.job_over:
            return
        stopped = [machine for machine in world.machines if not machine.frozen]
        world.note(self.name, f"suspends the job on {[machine.name for machine in stopped]}")
        self.suspended = True
        for machine in stopped:
            world.checks.touched(process for agent in world.agents_on(machine.name) for process in agent.processes.values())
            world.freeze(machine)
        self.tell()
        world.after(self._between(0.5, 4.0), self, self._resume, stopped)

    def _resume(self, stopped: list[Machine]) -> None:
        self.world.note(self.name, "resumes the job")
        for machine in stopped:
            self.world.checks.touched(
                process for agent in self.world.agents_on(machine.name) for process in agent.processes.values()
            )
            self.world.thaw(machine)
        self.suspended = False
        self.tell()

    # ---------------------------------------------------------------- what it expects

    def _look_for_odd_nodes(self) -> None:
        """A node that was given back leaves the job, a node of the job gets an agent, unless something is in the way."""
        world = self.world
        if self.suspended:  # nothing is decided, and no agent can answer
            self._odd_since_s.clear()
            return
        odd = {node: what for node in self.nodes if (what := self._oddity(node))}
        self._odd_since_s = {node: self._odd_since_s.get(node, world.now) for node in odd}
        for node, since_s in self._odd_since_s.items():
            if world.now - max(since_s, world.checks.struck_s) > CALM_S:
                world.checks.fail("6 accounted for", f"for {CALM_S} s {node} {odd[node]}")

    def _oddity(self, node: str) -> str:
        world = self.world
        record = world.ledger.nodes.get((world.job_id, node))
        job = world.ledger.jobs.get(world.job_id)
        if self.pool is not None and node in NODES and record is not None and not record.origin:
            return "is the pool's, and the ledger does not say so"
        able = [agent for agent in world.agents.values() if agent.alive and agent.welcomed_by == world.daemon.life]
        quiet = not self.suspended and world.daemon.alive and not world.partitioned and not any(m.frozen for m in world.machines)
        if (
            record is None
            or job is None
            or job.state != "running"
            or not quiet
            or not [a for a in able if a.machine.name != node]
        ):
            return ""
        if record.use == "released" and node != self.batch_host:
            return "is given back, and the job holds it"
        known_missing = record.use == "lost" or (record.use == "standby" and not record.agent_id)
        companion = self.pool is not None and node in self.pool.companions
        if record.state in ("up", "unknown") and known_missing and not companion and not world.agents_on(node):
            return "has no agent, and none is started"
        return ""
