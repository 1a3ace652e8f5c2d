"""One `tmd-run`: runs the processes that the daemon names, relays the newest status and the newest directive of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulator.engine import Actor, Machine
from tests.simulator.rank import SIGKILL, SimRank
from tmd.protocol.agent import (
    AgentDirective,
    AgentHello,
    AgentStatus,
    AgentWelcome,
    NodeOrder,
    OrderStatus,
    ProcessSpec,
    ProcessState,
    ProcessStatus,
)
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.rank import Directive, RankStatus

if TYPE_CHECKING:
    from tests.simulator.world import World


class SimAgent(Actor):
    """One life of the agent of a node."""

    def __init__(self, world: World, machine: Machine, life: int, *, launched: bool = False) -> None:
        super().__init__(machine, f"agent-{machine.name}-{life}")
        self.world = world
        self.agent_id = self.name
        self.processes: dict[str, SimRank] = {}
        self._states: dict[str, tuple[ProcessState, int | None, float]] = {}
        self._reports: dict[str, RankStatus] = {}
        self._launched = launched
        self._orders: dict[str, OrderStatus] = {}
        self._directive: AgentDirective | None = None
        self._version = 0
        self._status_due = False
        #: The life of the daemon that has welcomed this agent.
        self.welcomed_by = -1
        self.refused = ""
        world.after(world.pace("agent_start"), self, self._say_hello)
        world.after(world.settings.heartbeat_s, self, self._heartbeat)

    # ---------------------------------------------------------------- to and from the daemon

    def _say_hello(self) -> None:
        """Repeated until it is answered, for as long as it takes."""
        world = self.world
        if self.welcomed_by == world.daemon.life and world.daemon.alive:
            return
        hello = AgentHello(
            protocol=PROTOCOL,
            tmd_version="0",
            job_id=world.job_id,
            node=self.machine.name,
            agent_id=self.agent_id,
            host=self.machine.name,
            nnodes=world.nnodes,
            nproc_per_node=world.nproc_per_node,
            launches=world.slurm is not None,
            launched=self._launched,
            grows=world.slurm is not None,
        )
        world.transmit(self.machine, world.daemon, world.daemon.hello, self, hello)
        world.after(world.pace("hello_again"), self, self._say_hello)

    def welcome(self, life: int, _: AgentWelcome) -> None:
        self.welcomed_by = life
        self.send_status()

    def refuse(self, reason: str) -> None:
        self.refused = reason
        self.end()

    def connection_lost(self) -> None:
        self.welcomed_by = -1
        self.world.after(self.world.pace("hello_again"), self, self._say_hello)

    def _heartbeat(self) -> None:
        self.world.after(self.world.settings.heartbeat_s, self, self._heartbeat)
        self.send_status()

    def changed(self) -> None:
        """Changes that come together travel together."""
        if not self._status_due:
            self._status_due = True
            self.world.after(self.world.pace("gather"), self, self.send_status)

    def send_status(self) -> None:
        self._status_due = False
        world = self.world
        if self.welcomed_by != world.daemon.life:
            return
        self._version += 1
        processes = tuple(
            ProcessStatus(
                incarnation=incarnation,
                pid=1,
                state=state,
                exit_code=exit_code,
                exit_seen_s=seen_s,
                rank=self._reports.get(incarnation),
            )
            for incarnation, (state, exit_code, seen_s) in self._states.items()
        )
        status = AgentStatus(
            agent_id=self.agent_id,
            version=self._version,
            time_s=world.now,
            processes=processes,
            orders=tuple(self._orders.values()),
        )
        world.transmit(self.machine, world.daemon, world.daemon.status, self, status)

    def directed(self, directive: AgentDirective) -> None:
        newest = self._directive
        if newest is not None and (directive.generation, directive.sequence) <= (newest.generation, newest.sequence):
            return
        self._directive = directive
        if directive.job_over is not None:
            self.world.checks.sent_away(self.machine.name, directive.job_over)
            self.world.note(self.name, f"job over: {directive.job_over.reason}")
            self.end()
            return
        wanted = {spec.incarnation: spec for spec in directive.processes}
        for incarnation, process in self.processes.items():
            if incarnation not in wanted and process.alive:
                self.world.checks.retired(process)
                process.die(SIGKILL)
        for spec in wanted.values():
            if spec.incarnation not in self.processes:
                self._start(spec)
        for order in directive.ranks:
            self._relay(order)
        for errand in directive.orders:
            if errand.order_id not in self._orders:
                self._begin(errand)
        for order_id in directive.withdrawn:
            known = self._orders.get(order_id)
            if known is not None and known.state == "running" and self.world.slurm is not None:
                self.world.slurm.end_command(order_id)

    def _start(self, spec: ProcessSpec) -> None:
        process = SimRank(self, spec)
        self.processes[spec.incarnation] = process
        self.world.processes[spec.incarnation] = process
        self.world.note(self.name, f"starts {spec.incarnation} as rank {spec.rank}")
        self._set_state(process, "running")

    def _begin(self, order: NodeOrder) -> None:
        """Runs a command of the resource manager."""
        assert self.world.slurm is not None, "an order where nobody holds nodes"
        self._orders[order.order_id] = OrderStatus(
            order_id=order.order_id, kind=order.kind, nodes=order.nodes, state="running", since_s=self.world.now
        )
        self.world.slurm.command(self, order)
        self.changed()

    def order_ended(self, status: OrderStatus) -> None:
        self._orders[status.order_id] = status
        self.changed()

    def _relay(self, order: Directive) -> None:
        process = self.processes.get(order.incarnation)
        if process is not None and process.alive:
            self.world.after(self.world.pace("pipe"), process, process.on_directive, order)

    # ---------------------------------------------------------------- to and from the ranks

    def status_from(self, process: SimRank, status: RankStatus) -> None:
        """The pipe may lose a status that a newer one follows; the heartbeat is the newer one."""
        if self.alive and not self.world.is_lost(self.world.pipe_loss):
            self.world.after(self.world.pace("pipe"), self, self._report, status)

    def _report(self, status: RankStatus) -> None:
        known = self._reports.get(status.incarnation)
        if known is None or status.version > known.version:
            self._reports[status.incarnation] = status
            self.changed()

    def process_exited(self, process: SimRank) -> None:
        """First the sign (PF_EXITING), then the code; what lies in the pipe is read to its end before that."""
        self.world.after(self.world.pace("exiting"), self, self._exiting, process)
        self.world.after(self.world.pace("exited"), self, self._exited, process)

    def _exiting(self, process: SimRank) -> None:
        if self._states[process.incarnation][0] == "exited":
            return
        if process.last_status is not None:
            self._report(process.last_status)
        self._set_state(process, "exiting", seen_s=self.world.now)
        for other in self.processes.values():
            if other.alive and process.exit_code != 0:
                self.world.after(self.world.pace("pipe"), other, other.peer_exiting, process.incarnation)

    def _exited(self, process: SimRank) -> None:
        if process.last_status is not None:
            self._report(process.last_status)
        self._set_state(process, "exited", exit_code=process.exit_code, seen_s=self._states[process.incarnation][2])

    def _set_state(self, process: SimRank, state: ProcessState, *, exit_code: int | None = None, seen_s: float = 0.0) -> None:
        self._states[process.incarnation] = (state, exit_code, seen_s)
        self.changed()

    # ---------------------------------------------------------------- its end

    def end(self, *, silent: bool = False) -> None:
        """It leaves or is killed, and its ranks with it. `silent`: the machine is gone, so nobody closes the connection."""
        if not self.alive:
            return
        self.alive = False
        for process in self.processes.values():
            process.die(SIGKILL)
        if not silent:
            daemon = self.world.daemon
            self.world.after(self.world.pace("channel"), daemon, daemon.gone, self.agent_id)
