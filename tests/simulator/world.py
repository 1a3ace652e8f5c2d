"""Everything of one seed: the machines, the actors, the channels between them, and how long things take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulator.agent import SimAgent
from tests.simulator.bugs import Cores
from tests.simulator.checks import Checks
from tests.simulator.daemon import SimDaemon, SimLedger
from tests.simulator.engine import Actor, Engine, Machine
from tests.simulator.faults import Faults
from tests.simulator.links import End, Switchboard
from tests.simulator.rank import SimRank
from tests.simulator.slurm import SimSlurm
from tests.simulator.trace import Trace
from tmd.core.settings import CoreSettings

#: Seconds, lowest and highest.
PACES = {
    "agent_start": (0.0, 0.02),
    "hello_again": (0.06, 0.2),
    "gather": (0.0002, 0.002),
    "channel": (0.0005, 0.006),
    "pipe": (0.0001, 0.001),
    "hop": (0.0, 0.0015),
    "slow_hop": (0.005, 0.12),
    "link": (0.0002, 0.003),
    "start": (0.005, 0.02),
    "build": (0.01, 0.06),
    "warm_up": (0.005, 0.05),
    "forward": (0.003, 0.02),
    "frame": (0.00005, 0.001),
    "apply": (0.0005, 0.004),
    "slow_apply": (0.004, 0.03),
    "tail": (0.0001, 0.003),
    "slow_tail": (0.003, 0.03),
    "finish": (0.001, 0.02),
    "linger": (0.0, 0.03),
    "exiting": (0.001, 0.01),
    "exited": (0.01, 0.06),
    "copy": (0.003, 0.03),
    "ask_again": (0.003, 0.01),
}
#: Nodes that are given back, or need an agent, take their time: faults come before these steps.
QUIET_STEPS = 90
SETTINGS = CoreSettings(
    heartbeat_s=0.25,
    heartbeat_timeout_s=1.0,
    agent_grace_s=0.4,
    report_timeout_s=2.0,
    install_timeout_s=1.0,
    plan_timeout_s=2.5,
    migration_attempts=2,
    hold_limit_s=6.0,
    build_timeout_s=6.0,
    order_timeout_s=0.8,
    restart_limit=3,
)


class World(Engine):
    """One simulated cluster with one job and one daemon."""

    job_id = "job"
    settings = SETTINGS
    link_deadline_s = 0.7

    def __init__(self, seed: int, *, bug: str = "", verbose: bool = False) -> None:
        super().__init__(seed, Trace(on=verbose))
        self.seed = seed
        choose = self.random
        self.nnodes = choose.choice((2, 3, 3, 4))
        self.nproc_per_node = choose.choice((1, 1, 1, 2))
        self.standby_nodes = choose.choice((2, 2, 3))
        self.total_steps = choose.randint(15, 22)
        self.total_steps += 10 if self.nnodes * self.nproc_per_node == 2 else 0
        #: In every third seed agents hold the nodes, and start one another.
        self.agents_hold_nodes = seed % 3 == 2
        self.total_steps += QUIET_STEPS if self.agents_hold_nodes else 0
        self.channel_loss = choose.choice((0.0, 0.02, 0.1))
        self.channel_repeats = choose.choice((0.0, 0.05))
        self.pipe_loss = choose.choice((0.0, 0.02))
        self.ledger = SimLedger()
        self.processes: dict[str, SimRank] = {}
        self.pairs: list[End] = []
        self.partitioned: set[str] = set()
        self.head = Machine("head")
        self.machines = [Machine(f"n{index}") for index in range(self.nnodes + self.standby_nodes)]
        #: The newest agent of each machine; and all that ever were.
        self.agents: dict[str, SimAgent] = {}
        self._all_agents: list[SimAgent] = []
        self.cores = Cores(bug)
        self.switchboard = Switchboard(self)
        self.faults = Faults(self)
        self.checks = Checks(self)
        self.slurm = SimSlurm(self) if self.agents_hold_nodes else None
        self.daemon = SimDaemon(self)
        for machine in self.machines[: self.nnodes if self.agents_hold_nodes else None]:
            self.new_agent(machine)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def last_fault_step(self) -> int:
        """Faults are drawn for the steps up to this one."""
        return self.total_steps - 8 - (QUIET_STEPS if self.agents_hold_nodes else 0)

    def new_agent(self, machine: Machine, *, launched: bool = False) -> None:
        """Two at a time may be on a machine: the daemon sends the later one away."""
        agent = SimAgent(self, machine, len(self._all_agents) + 1, launched=launched)
        self._all_agents.append(agent)
        if not self.agents_on(machine.name)[:-1]:
            self.agents[machine.name] = agent

    def launch_agent(self, node: str) -> None:
        self.new_agent(next(machine for machine in self.machines if machine.name == node), launched=True)

    def agents_on(self, node: str) -> list[SimAgent]:
        """Those that live."""
        return [agent for agent in self._all_agents if agent.machine.name == node and agent.alive]

    def restart_daemon(self) -> None:
        if not self.daemon.alive:
            self.daemon = SimDaemon(self)
            self.note(self.daemon.name, "starts")

    # ---------------------------------------------------------------- how long things take, and what gets lost

    def pace(self, what: str) -> float:
        low, high = PACES[what]
        return low + (high - low) * self.random.random()

    def hop(self) -> float:
        """From a thread that has done something to the core that is told: now and then it takes its time."""
        return self.pace("slow_hop" if self.random.random() < 0.08 else "hop")

    def link_delay(self) -> float:
        return self.pace("link")

    def is_lost(self, loss: float) -> bool:
        """Drawn for one message. Where jobs go on for long, none is lost beside a partition: a heartbeat less from those who can
        be reached would look like a job that stands still."""
        return self.random.random() < loss and not (self.partitioned and self.agents_hold_nodes)

    def transmit(self, node: Machine, receiver: Actor, deliver: Callable[..., None], *args: Any) -> None:
        """One message between the daemon and the agent of `node`: late, lost, repeated, overtaken."""
        if node.name in self.partitioned or self.is_lost(self.channel_loss):
            return
        self.after(self.pace("channel"), receiver, deliver, *args)
        if self.random.random() < self.channel_repeats:
            self.after(10 * self.pace("channel"), receiver, deliver, *args)

    def is_deaf(self, incarnation: str) -> bool:
        """Nobody can open a link to this process any more."""
        process = self.processes.get(incarnation)
        return process is not None and process.deaf

    def note(self, who: str, text: str) -> None:
        if self.trace.on:
            self.trace.line(self.now, who, text)
