"""A real daemon process in a folder of its own, and agents made by hand that speak to it over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tmd.cli.client import Client, ClientError
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
    StoreReply,
    StoreRequest,
    ToAgent,
)
from tmd.protocol.codec import FROM_AGENT, MAX_MESSAGE_BYTES, PROTOCOL, TO_AGENT
from tmd.protocol.rank import RankStatus

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


async def until(condition: Callable[[], Any], what: str, *, within_s: float = DEADLINE_S) -> Any:
    """What the condition gives as soon as that is true. Raises AssertionError naming what did not come."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)
    return value


class Daemon:
    """`tmd serve` with its state below `folder`; several lives, one after the other."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.state_dir = folder / "state"
        self._log = folder / "daemon.log"
        self._arguments = arguments
        # The path of a unix socket is limited to 107 bytes, those of pytest are long.
        self._sockets = tempfile.TemporaryDirectory(prefix="tmd-")
        self.socket = Path(self._sockets.name) / "run" / "tmd.sock"
        self.client = Client(self.socket)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, environ: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> Daemon:
        """Returns once it answers. `prefix`: what comes before the command, setpriv for example."""
        command = [
            *prefix,
            sys.executable,
            "-m",
            "tmd.daemon.main",
            "serve",
            "--state-dir",
            str(self.state_dir),
            "--socket",
            str(self.socket),
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--resource-manager", "none", "--log-format", "json", *self._arguments, *more],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(environ or {})},
            )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(ClientError):
                self.client.get("/v1/health")
                return self
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log_text()}"
            assert time.monotonic() < deadline, f"the daemon does not answer:\n{self.log_text()}"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def status(self) -> Any:
        return self.client.get("/v1/status")

    def log_text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_text().splitlines() if line.startswith("{")]

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        self._sockets.cleanup()


class Agent:
    """One life of an agent without ranks: it says what the test wants said and keeps what it hears."""

    def __init__(self, job_id: str = "j1", node: str = "n1", **changes: Any) -> None:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "tmd_version": "0",
            "job_id": job_id,
            "node": node,
            "agent_id": f"agent-{job_id}-{node}",
            "host": "127.0.0.1",
            "nnodes": 2,
            "nproc_per_node": 1,
            "command": ("train.py",),
        }
        self.hello = AgentHello(**{**fields, **changes})
        self.welcome: AgentWelcome | None = None
        self.refusal = ""
        self.closed: int | None = None
        self.directives: list[AgentDirective] = []
        self.replies: list[StoreReply] = []
        self._version = 0
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None

    async def dial(self, daemon: Daemon, *, url: str = "http://tmd") -> Agent:
        """Connects and says nothing yet."""
        await self.leave()
        self.welcome, self.refusal, self.closed = None, "", None
        connector = aiohttp.UnixConnector(str(daemon.socket)) if url == "http://tmd" else None
        self._session = aiohttp.ClientSession(connector=connector)
        self._socket = await self._session.ws_connect(f"{url}/v1/agent", max_msg_size=MAX_MESSAGE_BYTES)
        self._reader = asyncio.create_task(self._read(self._socket))
        return self

    async def connect(self, daemon: Daemon, *, url: str = "http://tmd") -> Agent:
        """Says hello and waits for the answer, welcome or refusal."""
        await self.dial(daemon, url=url)
        await self.send(self.hello)
        await until(lambda: self.welcome or self.refusal or self.closed, f"an answer to {self.hello.agent_id}")
        return self

    async def send(self, message: FromAgent) -> None:
        await self.send_raw(FROM_AGENT.encode(message))

    async def send_raw(self, data: bytes) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(data)

    async def send_text(self, text: str) -> None:
        assert self._socket is not None
        await self._socket.send_str(text)

    async def say(self, *processes: ProcessStatus) -> None:
        """A status."""
        self._version += 1
        await self.send(AgentStatus(agent_id=self.hello.agent_id, version=self._version, time_s=time.time(), processes=processes))

    async def run_what_is_wanted(self, **rank: Any) -> None:
        """A status in which every wanted process runs and its rank reports `rank`."""
        await self.say(
            *(
                ProcessStatus(
                    incarnation=spec.incarnation,
                    pid=os.getpid(),
                    state="running",
                    rank=RankStatus(
                        job_id=self.hello.job_id,
                        incarnation=spec.incarnation,
                        version=self._version + 1,
                        rank=spec.rank,
                        host=self.hello.host,
                        port=4000 + spec.local_rank,
                        **rank,
                    ),
                )
                for spec in self.directives[-1].processes
            )
        )

    async def work(self) -> tuple[ProcessSpec, ...]:
        """The processes that the daemon wants, once it wants some."""
        await until(lambda: self.directives and self.directives[-1].processes, f"work for {self.hello.node}")
        return self.directives[-1].processes

    async def end(self) -> int:
        """The connection's close code, once the daemon has closed it."""
        code: int = await until(lambda: self.closed, f"the end of {self.hello.node}'s connection")
        return code

    async def refused(self) -> str:
        """The reason, once the daemon has refused this agent."""
        reason: str = await until(lambda: self.refusal, f"a refusal of {self.hello.node}")
        return reason

    async def job_over(self) -> JobOver:
        over: JobOver = await until(lambda: self.directives[-1].job_over, f"the job's end for {self.hello.node}")
        return over

    async def ask_store(self, request_id: int, operation: str, **fields: Any) -> StoreReply:
        before = len(self.replies)
        await self.send(StoreRequest(request_id=request_id, incarnation="i0", operation=operation, **fields))  # type: ignore[arg-type]
        await until(lambda: len(self.replies) > before, f"a reply to {operation}")
        return self.replies[-1]

    async def leave(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._socket = self._reader = self._session = None

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            self._take(TO_AGENT.decode(message.data))
        self.closed = socket.close_code or -1

    def _take(self, message: ToAgent) -> None:
        match message:
            case AgentWelcome():
                self.welcome = message
            case AgentRefused():
                self.refusal = message.reason
            case AgentDirective():
                self.directives.append(message)
            case StoreReply():
                self.replies.append(message)
