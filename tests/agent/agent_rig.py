"""What the tests of the agent stand on: a stand-in daemon, agents as real processes, and waits with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from aiohttp import WSMsgType, web

from tmd.protocol.agent import (
    AgentDirective,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    FromAgent,
    JobOver,
    ProcessSpec,
    ProcessStatus,
    StoreRequest,
    ToAgent,
)
from tmd.protocol.codec import FROM_AGENT, PROTOCOL, TO_AGENT
from tmd.protocol.keys import fingerprint
from tmd.protocol.rank import Directive

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = Path(__file__).with_name("rank_program.py")
TMD_RUN = (sys.executable, "-m", "tmd_worker.agent")
JOB = "j1"
KEY = b"k" * 32
WITHIN_S = 30.0

Value = TypeVar("Value")


async def until(what: str, look: Callable[[], Value | None], within_s: float = WITHIN_S) -> Value:
    """Waits for `look` to be truthy; fails naming `what`."""
    deadline = time.monotonic() + within_s
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)
    return value


class StandInDaemon:
    """The far end of /v1/agent: keeps what agents say, sends what a test tells it to."""

    def __init__(self, path: Path, *, heartbeat_s: float = 0.1, hold_limit_s: float = 60.0, refuse: str = "") -> None:
        self.path = path
        self.address = f"unix:{path}"
        self.heartbeat_s = heartbeat_s
        self.hold_limit_s = hold_limit_s
        self.refuse = refuse
        #: What it proves to be with: the job's key as its ledger has it; None: it does not know the job.
        self.key: bytes | None = KEY
        #: Sent right behind every greeting.
        self.at_once: AgentDirective | None = None
        self.generation = 1
        self.sequence = 0
        self.hellos: list[AgentHello] = []
        self.statuses: list[AgentStatus] = []
        self.requests: list[StoreRequest] = []
        self._runner: web.AppRunner | None = None
        self._socket: web.WebSocketResponse | None = None

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/v1/agent", self._serve)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Another life: all is forgotten but the job's key."""
        await self.stop()
        self.generation += 1
        self.sequence = 0
        self.hellos, self.statuses, self.requests = [], [], []
        await self.start()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await self._hear(socket, FROM_AGENT.decode(message.data))
        return socket

    async def _hear(self, socket: web.WebSocketResponse, message: FromAgent) -> None:
        match message:
            case AgentHello():
                self.hellos.append(message)
                self._socket = socket
                await self.send(self._greeting())
                if self.at_once is not None:
                    await self.send(self.at_once)
            case AgentStatus():
                self.statuses.append(message)
            case StoreRequest():
                self.requests.append(message)

    def _greeting(self) -> ToAgent:
        if self.refuse:
            known = fingerprint(self.key) if self.key is not None else ""
            return AgentRefused(reason=self.refuse, key_fingerprint=known, generation=self.generation)
        assert self.key is not None, "who does not know the job welcomes nobody"
        return AgentWelcome(
            protocol=PROTOCOL,
            generation=self.generation,
            heartbeat_s=self.heartbeat_s,
            hold_limit_s=self.hold_limit_s,
            job_key=self.key,
        )

    async def send(self, message: ToAgent) -> None:
        await self.send_bytes(TO_AGENT.encode(message))

    async def send_bytes(self, data: bytes) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(data)

    async def connected(self) -> AgentHello:
        return await until("an agent says hello", lambda: self.hellos[-1] if self.hellos else None)

    async def direct(self, *specs: ProcessSpec, orders: tuple[Directive, ...] = (), over: JobOver | None = None) -> None:
        await self.connected()
        self.sequence += 1
        await self.send(
            AgentDirective(generation=self.generation, sequence=self.sequence, processes=specs, ranks=orders, job_over=over)
        )

    def seen(self, incarnation: str) -> ProcessStatus | None:
        """The newest that is known of a process."""
        for process in self.statuses[-1].processes if self.statuses else ():
            if process.incarnation == incarnation:
                return process
        return None

    def history(self, incarnation: str) -> list[ProcessStatus]:
        return [process for status in self.statuses for process in status.processes if process.incarnation == incarnation]

    async def state(self, incarnation: str, state: str) -> ProcessStatus:
        def look() -> ProcessStatus | None:
            process = self.seen(incarnation)
            return process if process is not None and process.state == state else None

        return await until(f"{incarnation} is {state}", look)


def spec(incarnation: str, rank: int | None = 0, *, local_rank: int = 0, world_size: int = 2) -> ProcessSpec:
    return ProcessSpec(incarnation=incarnation, local_rank=local_rank, rank=rank, world_size=world_size)


def order(incarnation: str, sequence: int, **wants: Any) -> Directive:
    return Directive(
        job_id=JOB, incarnation=incarnation, generation=1, sequence=sequence, world_size=2, nproc_per_node=2, **wants
    )


@dataclasses.dataclass
class Agent:
    """A running tmd-run, in a session of its own. `out` and `err` are what it has printed so far."""

    process: asyncio.subprocess.Process
    out_path: Path
    err_path: Path

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    async def ended(self, within_s: float = WITHIN_S) -> int:
        """Its exit code; nothing of its session may be left."""
        async with asyncio.timeout(within_s):
            code = await self.process.wait()
        await until("nothing of the agent's session is left", lambda: not self.session())
        return code

    def session(self) -> list[int]:
        """Living processes of the agent's session."""
        return session_of(self.process.pid)


def session_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def end_session(leader: int) -> None:
    for pid in session_of(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def stop_again(agent: Agent) -> None:
    """Asks for the end until it comes: what follows at once on a first request counts as the same."""

    def ask() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.process.pid, signal.SIGTERM)  # process.terminate would reap it behind asyncio's back
        return agent.process.returncode is not None

    await until("the agent ends", ask)


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended, None if it was asked for before."""
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


class Rig:
    """Starts agents; ends all that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._agents: list[Agent] = []
        self._at_terminals: dict[int, int] = {}

    async def run(self, *arguments: str, environment: dict[str, str] | None = None, stdout: int | None = None) -> Agent:
        number = len(self._agents)
        out_path, err_path = self.folder / f"agent{number}.out", self.folder / f"agent{number}.err"
        with out_path.open("wb") as out, err_path.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *TMD_RUN,
                *arguments,
                env=self._environment() | (environment or {}),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                cwd=self.folder,
                start_new_session=True,
            )
        agent = Agent(process, out_path, err_path)
        self._agents.append(agent)
        return agent

    def at_terminal(self, *arguments: str) -> tuple[int, int]:
        """An agent in the foreground of a new terminal: its pid and the other end of that terminal (non-blocking)."""
        environment = self._environment()
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execve(TMD_RUN[0], [*TMD_RUN, *arguments], environment)
        self._at_terminals[pid] = terminal
        os.set_blocking(terminal, False)
        return pid, terminal

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TMD_", "SLURM", "OMP_"))}
        path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
        return inherited | {"PYTHONPATH": path, "TMD_TEST_FOLDER": str(self.folder)}

    async def directed(self, daemon: StandInDaemon, *mode: str, options: tuple[str, ...] = ()) -> Agent:
        """An agent of job j1 on node n1 whose ranks run the rank program."""
        shape = ("--nnodes", "1", "--nproc-per-node", "2", "--daemon", daemon.address)
        return await self.run(*shape, "--job-id", JOB, "--node", "n1", *options, str(RANK_PROGRAM), *mode)

    def heard(self, incarnation: str) -> list[dict[str, Any]]:
        """What the rank program of this incarnation has received, in order."""
        path = self.folder / f"{incarnation}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    async def heard_kind(self, incarnation: str, kind: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            return next((message for message in self.heard(incarnation) if message["type"] == kind), None)

        return await until(f"{incarnation} receives {kind}", look)

    async def close(self) -> None:
        for agent in self._agents:
            end_session(agent.process.pid)
            await agent.process.wait()
        for leader, terminal in self._at_terminals.items():
            end_session(leader)
            reap(leader)
            os.close(terminal)
