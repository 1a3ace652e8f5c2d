"""Real rank processes under the real DaemonCore, without a daemon's or an agent's shell: one loop in the test's own process
stands in for both. Nodes are names; every rank is a process with a socket pair, as an agent would start it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.session.store import Store
from tests.session.zygote import Zygote
from tmd.core.daemon import DaemonCore
from tmd.core.instructions import DirectAgent, Instruction, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.records import MigrationRecord
from tmd.core.settings import CoreSettings
from tmd.protocol.agent import (
    AgentDirective,
    AgentHello,
    AgentStatus,
    AgentWelcome,
    JobOver,
    ProcessSpec,
    ProcessStatus,
)
from tmd.protocol.codec import FROM_RANK, TO_RANK, FrameReader, frame
from tmd.protocol.control import FromRank, PeerExiting, RankOrder, RankUpdate, RankWelcome, ToRank, TransportName
from tmd.protocol.rank import RankStatus

JOB = "job"
SCRIPT = Path(__file__).with_name("training.py")


@dataclasses.dataclass(slots=True)
class RankProcess:
    """One rank process as its agent sees it."""

    spec: ProcessSpec
    pid: int
    sock: socket.socket
    reader: FrameReader[FromRank]
    log: Path
    status: RankStatus | None = None
    exit_code: int | None = None
    #: Sent already, so that only changes go down.
    order: bytes = b""

    @property
    def alive(self) -> bool:
        return self.exit_code is None


@dataclasses.dataclass(slots=True)
class Node:
    """The stand-in for one node's agent."""

    name: str
    index: int
    #: How often it has come back: each time its agent is another one.
    life: int = 0
    processes: dict[str, RankProcess] = dataclasses.field(default_factory=dict)
    welcome: AgentWelcome | None = None
    directive: AgentDirective | None = None
    version: int = 0
    dirty: bool = False
    #: Its agent may leave.
    over: JobOver | None = None

    @property
    def agent_id(self) -> str:
        return f"agent-{self.name}.{self.life}"


class Cluster:
    """A job on `nodes` training nodes and `standbys` more. Use as a context manager: it kills what it started."""

    def __init__(
        self,
        folder: Path,
        zygote: Zygote,
        *,
        nodes: int = 2,
        per_node: int = 1,
        standbys: int = 0,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        script: Path = SCRIPT,
        settings: CoreSettings | None = None,
        transport: TransportName = "delta",
    ) -> None:
        self.folder = folder
        self._transport = transport
        self._zygote = zygote
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nodes = {f"n{i}": Node(f"n{i}", i) for i in range(nodes + standbys)}
        self.store = Store()
        self.refused: list[str] = []
        self.released: list[str] = []
        self.sentences: list[str] = []
        self._training_nodes, self._per_node = nodes, per_node
        self._script = script
        self._arguments, self._environment = arguments, environment or {}
        self._selector = selectors.DefaultSelector()
        self._core = DaemonCore(settings or CoreSettings(), generation=1)
        self._next_beat_s = 0.0
        self._started: list[RankProcess] = []

    def __enter__(self) -> Cluster:
        for node in self.nodes.values():
            self._join(node)
        return self

    def _join(self, node: Node) -> None:
        """Its agent says hello."""
        hello = AgentHello(
            protocol=(1, 0),
            tmd_version="0",
            job_id=JOB,
            node=node.name,
            agent_id=node.agent_id,
            host="127.0.0.1",
            nnodes=self._training_nodes,
            nproc_per_node=self._per_node,
            node_index=node.index,
            uid=os.getuid(),
        )
        self._perform(self._core.agent_hello(time.time(), hello, b"k" * 32))

    def __exit__(self, *_: object) -> None:
        for started in self._started:
            if self._zygote.exit_code(started.pid) is None:
                self.kill(started)
            self._zygote.wait(started.pid)
            started.sock.close()
        self._selector.close()

    # ---------------------------------------------------------------- what tests do

    @property
    def core(self) -> DaemonCore:
        return self._core

    def migrate(self, rank: int) -> str:
        """An operator asks for a planned migration; returns its id."""
        migration_id, instructions = self._core.request_migration(time.time(), JOB, rank=rank, who="test")
        self._perform(instructions)
        return migration_id

    def member(self, rank: int) -> RankProcess:
        """The living process that holds this rank now."""
        for process in self._started:
            status = process.status
            if process.alive and status is not None and status.rank == rank and status.has_state and status.phase != "frozen":
                return process
        raise LookupError(f"no living process has rank {rank}")

    def kill(self, process: RankProcess) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and the zygote has seen it first
            os.kill(process.pid, signal.SIGKILL)

    def processes(self) -> list[RankProcess]:
        return list(self._started)

    @property
    def over(self) -> JobOver | None:
        """The end of the job, once every agent has been told to leave."""
        if any(node.over is None for node in self.nodes.values()):
            return None
        record = self._core.job(JOB).record
        return JobOver(exit_code=record.exit_code or 0, reason=record.reason)

    def migration(self, migration_id: str) -> MigrationRecord:
        """A migration as the daemon sees it now."""
        return next(view.record for view in self._core.migrations() if view.record.migration_id == migration_id)

    def stand_at_gate(self, *, standbys: int, step: int) -> None:
        """Waits until that many standbys are ready and every rank has come to the gate's step."""
        ranks = range(self._training_nodes * self._per_node)
        self.run_until(lambda: len(self.ready_standbys()) >= standbys and all(self.step_of(r) == step for r in ranks))

    def stage_move(self, rank: int) -> str:
        """Asks for a planned migration and waits until its flip may come with the next vote."""
        migration_id = self.migrate(rank)
        self.run_until(lambda: self._core.job(JOB).record.armed)
        return migration_id

    def open_gate(self) -> None:
        """Lets the gate's step go on."""
        (self.folder / "go").touch()

    def drain(self, node: str) -> None:
        """The resource manager says that this node is to be emptied."""
        self._perform(self._core.node_state(time.time(), node, "draining", "test"))

    def come_back(self, name: str) -> None:
        """A node that was given back boots again and offers itself: a new agent, a standby node."""
        gone = self.nodes[name]
        self.released.remove(name)
        for process in gone.processes.values():
            self._zygote.wait(process.pid)
        self._perform(self._core.agent_gone(time.time(), gone.agent_id))
        self.nodes[name] = Node(name, max(node.index for node in self.nodes.values()) + 1, gone.life + 1)
        self._join(self.nodes[name])

    def exit_code_of(self, incarnation: str) -> int:
        """Once it has ended: one that left the job in the middle may do so after the others."""
        process = next(p for p in self._started if p.spec.incarnation == incarnation)
        self.run_until(lambda: process.exit_code is not None)
        assert process.exit_code is not None
        return process.exit_code

    def started(self, rank: int) -> list[str]:
        """The incarnations that have held this rank."""
        return [p.spec.incarnation for p in self._started if p.status is not None and p.status.rank == rank]

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Plays daemon and agents until `condition`. Raises AssertionError with everyone's logs when the time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s} s\n{self.report()}")
            self._turn()

    def run(self, timeout_s: float = 60.0) -> JobOver:
        """Until the job is over."""
        self.run_until(lambda: self.over is not None, timeout_s)
        assert self.over is not None
        return self.over

    def counters(self, rank: int) -> dict[str, int]:
        """What the last process that held this rank has counted."""
        statuses = [p.status for p in self._started if p.status is not None and p.status.rank == rank]
        return statuses[-1].counters

    def step_of(self, rank: int) -> int:
        """The next step of the rank's member, -1 while nobody has it."""
        with contextlib.suppress(LookupError):
            status = self.member(rank).status
            return status.next_step if status is not None else -1
        return -1

    def faults_fired(self) -> int:
        """How many of the armed faults have fired."""
        return len(list((self.folder / "faults").iterdir()))

    def ready_standbys(self) -> list[RankProcess]:
        return [p for p in self._started if p.alive and p.status is not None and p.status.phase == "ready"]

    def report(self) -> str:
        """Everything a failed test should show."""
        lines = [f"{k}: {v}" for k, v in self._core.sentences().items()]
        for process in self._started:
            lines.append(f"--- {process.spec} exit={process.exit_code} status={process.status}")
            lines.append(process.log.read_text(errors="replace")[-6000:])
        return "\n".join(lines)

    # ---------------------------------------------------------------- the loop

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.01):
            self._read(*key.data)
        self._see_exits()
        now = time.time()
        if now >= self._next_beat_s:
            self._next_beat_s = now + 0.1
            for node in self.nodes.values():
                node.dirty = True
        for node in self.nodes.values():
            if node.dirty and node.welcome is not None:
                self._report_node(node)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= time.time():
            self._perform(self._core.tick(time.time()))

    def _read(self, node: Node, process: RankProcess) -> None:
        try:
            data = process.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(process.sock)
            return
        for message in process.reader.feed(data):
            if isinstance(message, RankUpdate):
                process.status = message.status
                node.dirty = True
            else:
                self._send(process, self.store.answer(message))

    def _see_exits(self) -> None:
        for node in self.nodes.values():
            for process in node.processes.values():
                was_alive = process.alive
                if process.alive:
                    process.exit_code = self._zygote.exit_code(process.pid)
                if process.alive != was_alive:
                    node.dirty = True
                    for peer in node.processes.values():
                        if peer.alive:
                            self._send(peer, PeerExiting(incarnation=process.spec.incarnation))

    def _report_node(self, node: Node) -> None:
        node.dirty = False
        node.version += 1
        processes = tuple(
            ProcessStatus(
                incarnation=p.spec.incarnation,
                pid=p.pid,
                state="running" if p.alive else "exited",
                exit_code=p.exit_code,
                rank=p.status,
            )
            for p in node.processes.values()
        )
        status = AgentStatus(agent_id=node.agent_id, version=node.version, time_s=time.time(), processes=processes)
        self._perform(self._core.agent_status(time.time(), status))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case WelcomeAgent(agent_id, welcome):
                    if (node := self._node_of(agent_id)) is not None:
                        node.welcome = welcome
                case RefuseAgent(_, reason):
                    self.refused.append(reason)
                case ReleaseNode(_, node, _):
                    self.released.append(node)
                case DirectAgent(agent_id, directive):
                    if (node := self._node_of(agent_id)) is not None:
                        self._direct(node, directive)
                case _:
                    pass

    def _node_of(self, agent_id: str) -> Node | None:
        """None for the agent of a life that is over."""
        return next((node for node in self.nodes.values() if node.agent_id == agent_id), None)

    def _direct(self, node: Node, directive: AgentDirective) -> None:
        node.directive = directive
        node.over = directive.job_over
        wanted = {spec.incarnation for spec in directive.processes}
        for spec in directive.processes:
            if spec.incarnation not in node.processes:
                node.processes[spec.incarnation] = self._start(node, spec)
                node.dirty = True
        for incarnation, process in node.processes.items():
            if incarnation not in wanted and process.alive:
                self.kill(process)
        for order in directive.ranks:
            process = node.processes.get(order.incarnation)
            if process is not None and process.alive:
                self._send(process, RankOrder(directive=order))

    def _start(self, node: Node, spec: ProcessSpec) -> RankProcess:
        ours, theirs = socket.socketpair()
        log = self.folder / f"{spec.incarnation.replace('/', '_')}.log"
        environment = {
            "RANK": str(spec.rank if spec.rank is not None else -1),
            "LOCAL_RANK": str(spec.local_rank),
            "WORLD_SIZE": str(spec.world_size),
            **self._environment,
        }
        standby = ("--standby",) if spec.rank is None else ()
        arguments = [*standby, str(self._script), str(self.folder), *self._arguments]
        with log.open("wb") as output:
            pid = self._zygote.fork(arguments, environment, theirs.fileno(), output.fileno())
        theirs.close()
        started = RankProcess(spec, pid, ours, FrameReader(FROM_RANK), log)
        self._started.append(started)
        self._selector.register(ours, selectors.EVENT_READ, (node, started))
        assert node.welcome is not None
        welcome = RankWelcome(
            job_id=JOB,
            incarnation=spec.incarnation,
            node=node.name,
            host="127.0.0.1",
            rank=spec.rank,
            local_rank=spec.local_rank,
            world_size=spec.world_size,
            nproc_per_node=self._per_node,
            job_key=node.welcome.job_key,
            hold_limit_s=node.welcome.hold_limit_s,
            heartbeat_s=node.welcome.heartbeat_s,
            transport=self._transport,
        )
        self._send(started, welcome)
        return started

    def _send(self, process: RankProcess, message: ToRank) -> None:
        with contextlib.suppress(OSError):
            process.sock.sendall(frame(TO_RANK.encode(message)))
