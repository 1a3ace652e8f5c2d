"""The pool of a seed in which agents hold the job's nodes: two machines that no job has, and the commands that take them.

Contract: a growth fails, hangs, works without the agent saying so, or outlives the agent that began it. A companion's node is
the job's for as long as an agent runs there, or until the daemon has it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulator.engine import Machine
from tmd.core.pool import Pool
from tmd.protocol.agent import NodeOrder

if TYPE_CHECKING:
    from tests.simulator.agent import SimAgent
    from tests.simulator.slurm import SimSlurm

NODES = ("p0", "p1")
RESERVATION = "standby"
#: How a growth ends, with weights.
GROWTHS = {"works": 66, "fails": 14, "hangs": 5, "says nothing": 8, "starter dies": 7}
#: A companion job whose agent does not come ends after this long.
COMPANION_S = 1.0


class SimPool:
    """See the module's contract."""

    def __init__(self, slurm: SimSlurm) -> None:
        self._slurm = slurm
        self._world = slurm.world
        self.way = slurm.random.choice(("expand", "companion"))
        #: Nodes of companion jobs -> that job's id.
        self.companions: dict[str, str] = {}
        self._ids = 0
        slurm.world.machines += [Machine(name) for name in NODES]

    def tell(self) -> None:
        """What there is now."""
        free = tuple(node for node in NODES if node not in self._slurm.nodes and not self._world.agents_on(node))
        word = Pool(name=RESERVATION, way=self.way, nodes=NODES, free=free, nodes_per_job=len(NODES))  # type: ignore[arg-type]
        self._world.after(0.01, self._slurm, self._deliver, word)

    def _deliver(self, word: Pool) -> None:
        daemon = self._world.daemon
        if daemon.alive:
            daemon.carry_out(daemon.core.pool(self._world.now, word))

    # ---------------------------------------------------------------- what agents ask for

    def grow(self, agent: SimAgent, order: NodeOrder, how: str) -> None:
        """An agent takes a node."""
        world = self._world
        (node,) = order.nodes
        world.note(self._slurm.name, f"{agent.name} takes {node} ({order.kind}), which {how}")
        if order.reservation != RESERVATION or order.kind != self.way or node not in NODES:
            world.checks.fail("6 accounted for", f"{agent.name} is to take {order}")
        delay_s = 0.02 + 0.1 * self._slurm.random.random()
        if how == "starter dies":
            world.after(delay_s * self._slurm.random.random() * 2, self._slurm, self._slurm.kill, agent)
        if how == "fails":
            world.after(delay_s, self._slurm, self._slurm.ends, agent, order, "failed", "salloc: error: Access denied")
        elif how != "hangs":
            world.after(delay_s, self._slurm, self._taken, agent, order, how)

    def _taken(self, agent: SimAgent, order: NodeOrder, how: str) -> None:
        (node,) = order.nodes
        if node in self._slurm.nodes:
            self._slurm.ends(agent, order, "failed", f"salloc: error: {node} is busy")
            return
        if not agent.alive:
            return  # what was granted and not merged is ended by whoever finds it
        self._slurm.nodes.append(node)
        if order.kind == "companion":
            self._ids += 1
            self.companions[node] = f"c{self._ids}"
            self._world.launch_agent(node)
            self._world.after(COMPANION_S, self._slurm, self._end_if_empty, self.companions[node], node)
        self._slurm.tell()
        if how == "works":
            self._slurm.ends(agent, order, "done", "")

    # ---------------------------------------------------------------- how companions end

    def look(self) -> None:
        """A companion job ends with its agent."""
        for node, job_id in list(self.companions.items()):
            self._end_if_empty(job_id, node)

    def _end_if_empty(self, job_id: str, node: str) -> None:
        if self.companions.get(node) == job_id and not self._world.agents_on(node):
            self._end(node)

    def end_companion(self, job_id: str, node: str) -> None:
        """The daemon has it ended."""
        if self.companions.get(node) == job_id:
            self._world.checks.given_back(node)
            for agent in self._world.agents_on(node):
                self._world.checks.touched(agent.processes.values())
                agent.end()
            self._end(node)

    def _end(self, node: str) -> None:
        self._world.note(self._slurm.name, f"ends {self.companions.pop(node)} on {node}")
        if node in self._slurm.nodes:
            self._slurm.nodes.remove(node)
        self._slurm.tell()
