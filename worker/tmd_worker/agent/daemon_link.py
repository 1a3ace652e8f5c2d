"""The agent's WebSocket to the daemon: hello, then statuses up and directives down, over as many connections as it takes.

Contract: nothing the daemon does (away, restarted, frozen, sending rubbish) touches the ranks; the link tries again for ever.
Statuses are level-triggered, so only the newest is sent; a store request is sent again on each new connection until answered.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import Callable
from typing import Literal, NoReturn, Protocol

import aiohttp
import msgspec

from tmd.munge.library import MungeError
from tmd.protocol.agent import AgentDirective, AgentHello, AgentRefused, AgentStatus, AgentWelcome, StoreReply, StoreRequest
from tmd.protocol.codec import FROM_AGENT, MAX_MESSAGE_BYTES, TO_AGENT, MessageRefused, check_protocol
from tmd_worker.agent.proof import MungeProof, UntrustedAnswer
from tmd_worker.agent.settings import DaemonAddress

BACKOFF_FIRST_S = 0.05
BACKOFF_LIMIT_S = 2.0
#: A connection that lasted this long was a good one: the next attempt comes at once.
STEADY_S = 2.0
CONNECT_TIMEOUT_S = 10.0
#: WebSocket pings notice a daemon host that vanished without a word.
PING_S = 10.0
#: Changes that nobody waits for are collected this long.
LAZY_S = 0.1
#: While the daemon is away this is said again so often.
REMIND_S = 60.0
#: Store requests without an answer, over all ranks of the node.
REQUESTS_LIMIT = 4096
REQUESTS_LIMIT_BYTES = 64 << 20
#: Pause between attempts while what answers is not this job's daemon.
NOT_OURS_PAUSE_S = 5.0

_GO_ON = "running ranks go on, this agent tries again until it is back"
#: Why there is no connection.
_Trouble = Literal["away", "not ours", "no proof"]


class DaemonRefusal(Exception):
    """The daemon does not serve this agent, and never will; the text is its reason."""


class NotOurDaemon(Exception):
    """What answers is not the daemon of the running ranks, so nothing it says counts; the text is why."""


class LinkOwner(Protocol):
    """Who the link works for."""

    def hello(self) -> AgentHello: ...

    def objection(self, answer: AgentWelcome | AgentRefused) -> str | None:
        """Why the daemon that answers so has no say in what runs here, or None."""
        ...

    def status(self) -> AgentStatus: ...

    def on_welcome(self, welcome: AgentWelcome) -> None: ...

    def on_directive(self, directive: AgentDirective) -> None: ...

    def on_store_reply(self, reply: StoreReply) -> None: ...


class DaemonLink:
    """All connections of one agent's life, one after the other."""

    def __init__(
        self, address: DaemonAddress, owner: LinkOwner, say: Callable[[str], None], proof: MungeProof | None = None
    ) -> None:
        """`proof`: who this is, where the socket does not say."""
        self._address = address
        self._owner = owner
        self._say = say
        self._proof = proof
        self._heartbeat_s = 1.0
        self._wake = asyncio.Event()
        self._status_due = False
        self._lazy: asyncio.TimerHandle | None = None
        self._sent = asyncio.Event()
        self._requests: dict[tuple[str, int], StoreRequest] = {}
        self._requests_bytes = 0
        self._unsent: collections.deque[StoreRequest] = collections.deque()
        #: What the daemon said when it closed the connection, if anything.
        self._farewell = ""
        self._connected = False
        self._away_since_s = time.monotonic()
        self._reminded_s = 0.0
        self._reminded_of: _Trouble | None = None

    # ---------------------------------------------------------------- for the owner

    def status_changed(self, *, urgent: bool) -> None:
        """A status goes out now, or within LAZY_S together with what else changes."""
        self._sent.clear()
        if urgent:
            self._send_status()
        elif self._lazy is None:
            self._lazy = asyncio.get_running_loop().call_later(LAZY_S, self._send_status)

    def request(self, request: StoreRequest) -> str | None:
        """Passes a store request on, now or when the daemon is back; the reason if that is refused."""
        key = (request.incarnation, request.request_id)
        if key not in self._requests:
            size = _request_bytes(request)
            if len(self._requests) >= REQUESTS_LIMIT or self._requests_bytes + size > REQUESTS_LIMIT_BYTES:
                return f"{len(self._requests)} store requests ({self._requests_bytes} bytes) of this node wait already"
            self._requests[key] = request
            self._requests_bytes += size
        self._unsent.append(request)
        self._wake.set()
        return None

    def forget_requests(self, incarnation: str) -> None:
        """The rank is gone: nobody waits for these answers."""
        for key in [key for key in self._requests if key[0] == incarnation]:
            self._answered(key)

    def away_s(self) -> float:
        """For how long the daemon has not been there, 0 while it is."""
        return 0.0 if self._connected else time.monotonic() - self._away_since_s

    async def flush(self, within_s: float) -> None:
        """Waits until the newest status is on its way, if the daemon is there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._sent.wait()

    # ---------------------------------------------------------------- connections

    async def run(self) -> None:
        """Until cancelled. Raises DaemonRefusal."""
        backoff_s = BACKOFF_FIRST_S
        trouble: _Trouble
        while True:
            began_s = time.monotonic()
            try:
                trouble, why = "away", await self._connection()
            except (NotOurDaemon, UntrustedAnswer) as error:
                trouble, why = "not ours", str(error)
                backoff_s = NOT_OURS_PAUSE_S
            except MungeError as error:
                trouble, why = "no proof", error.whole()
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                trouble, why = "away", _words(error)
            if self._connected:
                self._connected = False
                self._away_since_s = time.monotonic()
                self._reminded_s = 0.0
                if self._away_since_s - began_s >= STEADY_S:
                    backoff_s = BACKOFF_FIRST_S
            self._remind(trouble, why)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_LIMIT_S)

    async def _connection(self) -> str:
        """One connection to its end; why it ended."""
        path = self._address.unix_path
        connector = aiohttp.UnixConnector(path) if path is not None else None
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                socket = await session.ws_connect(
                    f"{self._address.url}/v1/agent", max_msg_size=MAX_MESSAGE_BYTES, heartbeat=PING_S, compress=0
                )
            try:
                return await self._speak(socket)
            except MessageRefused as error:
                return f"it sent what this agent cannot accept: {error}"
            finally:
                with contextlib.suppress(TimeoutError, OSError, aiohttp.ClientError):
                    async with asyncio.timeout(1.0):
                        await socket.close()

    async def _speak(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        hello = msgspec.structs.replace(self._owner.hello(), own_end=_own_end(socket))
        if self._proof is not None:
            hello = await self._proof.attach(hello)
        await socket.send_bytes(FROM_AGENT.encode(hello))
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            first = await self._receive(socket)
        if first is None:
            return f"it closed the connection at once{self._farewell}"
        if isinstance(first, AgentRefused):
            self._refused(first)
        if not isinstance(first, AgentWelcome):
            raise MessageRefused(f"{type(first).__name__} before a welcome")
        if self._proof is not None:
            first = await self._proof.opened(first, hello)
        if reason := self._owner.objection(first):
            raise NotOurDaemon(reason)
        if reason := check_protocol(first.protocol):
            raise DaemonRefusal(reason)
        self._welcomed(first)
        sender = asyncio.create_task(self._send_all(socket), name="to daemon")
        receiver = asyncio.create_task(self._receive_all(socket), name="from daemon")
        try:
            done, _ = await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return "it closed the connection"
        finally:
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    def _refused(self, refusal: AgentRefused) -> NoReturn:
        if objection := self._owner.objection(refusal):
            raise NotOurDaemon(f"{objection}. It says: {refusal.reason}")
        raise DaemonRefusal(refusal.reason)

    def _welcomed(self, welcome: AgentWelcome) -> None:
        self._say(f"connected to the daemon at {self._address.text} (generation {welcome.generation})")
        self._connected = True
        self._heartbeat_s = max(0.01, welcome.heartbeat_s)
        self._unsent = collections.deque(self._requests.values())
        self._owner.on_welcome(welcome)
        self._send_status()

    def _remind(self, trouble: _Trouble, why: str) -> None:
        """Now and then, and whenever it is another trouble."""
        now = time.monotonic()
        if self._reminded_s and self._reminded_of == trouble and now - self._reminded_s < REMIND_S:
            return
        self._reminded_s, self._reminded_of = now, trouble
        address = self._address.text
        match trouble:
            case "not ours":
                self._say(f"the daemon at {address} is not this job's: {why}")
            case "no proof":
                self._say(f"munge does not work between this node and the daemon at {address}: {why}; {_GO_ON}")
            case "away":
                self._say(f"no daemon at {address}: {why}; {_GO_ON} (on the head node: systemctl status tmd)")

    # ---------------------------------------------------------------- messages

    async def _receive(
        self, socket: aiohttp.ClientWebSocketResponse
    ) -> AgentWelcome | AgentRefused | AgentDirective | StoreReply | None:
        """The next message, None at the end. Raises MessageRefused."""
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return TO_AGENT.decode(message.data)
        if message.type is aiohttp.WSMsgType.TEXT:
            raise MessageRefused("a text message, where all are binary")
        if message.type is aiohttp.WSMsgType.ERROR:
            raise MessageRefused(str(message.data))
        self._farewell = f": {message.extra}" if message.extra else ""
        return None

    async def _receive_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while (message := await self._receive(socket)) is not None:
            if isinstance(message, AgentDirective):
                self._owner.on_directive(message)
            elif isinstance(message, StoreReply):
                self._answered((message.incarnation, message.request_id))
                self._owner.on_store_reply(message)
            elif isinstance(message, AgentRefused):
                self._refused(message)

    def _answered(self, key: tuple[str, int]) -> None:
        request = self._requests.pop(key, None)
        if request is not None:
            self._requests_bytes -= _request_bytes(request)

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                self._status_due = True
            self._wake.clear()
            if self._status_due:
                self._status_due = False
                await socket.send_bytes(FROM_AGENT.encode(self._owner.status()))
                if not self._status_due:
                    self._sent.set()
            while self._unsent:
                request = self._unsent.popleft()
                if (request.incarnation, request.request_id) in self._requests:
                    await socket.send_bytes(FROM_AGENT.encode(request))

    def _send_status(self) -> None:
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        self._status_due = True
        self._wake.set()


def _own_end(socket: aiohttp.ClientWebSocketResponse) -> str:
    """The address that this connection comes from, as this machine knows it; empty on a unix socket."""
    name = socket.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) else ""


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
    return str(error) or type(error).__name__


def _request_bytes(request: StoreRequest) -> int:
    return len(request.key) + len(request.value) + len(request.expected) + sum(map(len, request.keys)) + 64
