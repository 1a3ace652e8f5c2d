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
        self.channel_loss = choose.choice((0.0, 0.02, 0.1))
        self.channel_repeats = choose.choice((0.0, 0.05))
        self.pipe_loss = choose.choice((0.0, 0.02))
        self.ledger = SimLedger()
        self.processes: dict[str, SimRank] = {}
        self.pairs: list[End] = []
        self.partitioned: set[str] = set()
        self.head = Machine("head")
        self.machines = [Machine(f"n{index}") for index in range(self.nnodes + self.standby_nodes)]
        self.agents: dict[str, SimAgent] = {}
        self._lives = 0
        self.cores = Cores(bug)
        self.switchboard = Switchboard(self)
        self.faults = Faults(self)
        self.checks = Checks(self)
        self.daemon = SimDaemon(self)
        for machine in self.machines:
            self.new_agent(machine)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def new_agent(self, machine: Machine) -> None:
        self._lives += 1
        self.agents[machine.name] = SimAgent(self, machine, self._lives)

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

    def transmit(self, node: Machine, receiver: Actor, deliver: Callable[..., None], *args: Any) -> None:
        """One message between the daemon and the agent of `node`: late, lost, repeated, overtaken."""
        if node.name in self.partitioned or self.random.random() < self.channel_loss:
            return
        self.after(self.pace("channel"), receiver, deliver, *args)
        if self.random.random() < self.channel_repeats:
            self.after(10 * self.pace("channel"), receiver, deliver, *args)

    def note(self, who: str, text: str) -> None:
        if self.trace.on:
            self.trace.line(self.now, who, text)
