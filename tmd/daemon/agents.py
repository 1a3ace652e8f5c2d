"""The agents' WebSockets: one connection per agent, the newest if there are several.

Contract: the first message is a hello, within a deadline, from somebody who may speak for that job; then statuses and store
requests come in, directives and replies go out. An agent that reads slowly or not at all costs one buffer and delays nobody: of
several directives only the newest is kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from tmd.core.instructions import DirectAgent, Instruction, RefuseAgent, WelcomeAgent
from tmd.daemon.admission import Admissions, NotAdmitted, Place, check_reach
from tmd.daemon.identity import machine, peer_address, peer_uid
from tmd.daemon.loop import CoreLoop
from tmd.daemon.proofs import Proofs
from tmd.daemon.store import RendezvousStores
from tmd.munge.library import MungeError
from tmd.protocol.agent import AgentHello, AgentRefused, AgentStatus, AgentWelcome, StoreReply, StoreRequest, ToAgent
from tmd.protocol.codec import FROM_AGENT, MAX_MESSAGE_BYTES, TO_AGENT, MessageRefused, check_protocol

log = logging.getLogger("tmd.daemon")

HELLO_TIMEOUT_S = 10.0
#: A connection on which nothing at all comes for so long is closed; a living agent sends heartbeats.
SILENCE_LIMIT_S = 60.0
#: A message that the agent's machine has not taken after so long ends the connection.
SEND_TIMEOUT_S = 30.0
#: An agent has this long to acknowledge the end of its connection.
CLOSE_TIMEOUT_S = 1.0
#: Store requests of one agent that may wait at a time; more are left unread.
STORE_REQUESTS_OPEN = 1024
#: How connections end without anybody's bug.
_ENDS = (MessageRefused, TimeoutError, ConnectionError, MungeError)


class AgentConnection:
    """What goes out to one agent."""

    def __init__(
        self, hello: AgentHello, uid: int, place: Place, seal: Callable[[AgentWelcome], Awaitable[AgentWelcome]] | None = None
    ) -> None:
        """`seal` hides the job key of a welcome from all others than the agent's user."""
        self.job_id = hello.job_id
        self.agent_id = hello.agent_id
        self.node = hello.node
        self.uid = uid
        self.place = place
        self._seal = seal
        self._messages: collections.deque[ToAgent] = collections.deque()
        self._directive: DirectAgent | None = None
        self._closing = False
        self._bell = asyncio.Event()

    def send(self, message: ToAgent) -> None:
        self._messages.append(message)
        self._bell.set()

    def direct(self, instruction: DirectAgent) -> None:
        self._directive = instruction
        self._bell.set()

    def close(self, refusal: AgentRefused | None = None) -> None:
        """After what waits has been sent; with a refusal the agent is told not to come back."""
        if refusal is not None:
            self.send(refusal)
        self._closing = True
        self._bell.set()

    async def send_all(self, socket: web.WebSocketResponse) -> None:
        """Until closed. Raises OSError or TimeoutError when the agent does not take it, MungeError if the job key cannot be
        sealed for it."""
        while True:
            await self._bell.wait()
            self._bell.clear()
            while self._messages or self._directive is not None:
                if self._messages:
                    message = self._messages.popleft()
                else:
                    assert self._directive is not None
                    message, self._directive = self._directive.directive, None
                if self._seal is not None and isinstance(message, AgentWelcome):
                    message = await self._seal(message)
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await socket.send_bytes(TO_AGENT.encode(message))
            if self._closing:
                return


class AgentHub:
    """All connected agents."""

    def __init__(
        self, admissions: Admissions, stores: RendezvousStores, jobs_of_agents: Mapping[str, str], proofs: Proofs
    ) -> None:
        """`jobs_of_agents`: as an earlier daemon knew them."""
        self._admissions = admissions
        self._proofs = proofs
        self._stores = stores
        self._loop: CoreLoop | None = None
        self._connections: dict[str, AgentConnection] = {}
        #: An agent id belongs to the job that it was first used for.
        self._jobs_of_agents = dict(jobs_of_agents)
        self._stopping = False

    def attach(self, loop: CoreLoop) -> None:
        """Where events go; before the first connection."""
        self._loop = loop

    def __len__(self) -> int:
        return len(self._connections)

    def to_agent(self, instruction: WelcomeAgent | RefuseAgent | DirectAgent) -> None:
        connection = self._connections.get(instruction.agent_id)
        if connection is None:
            return
        match instruction:
            case WelcomeAgent():
                connection.send(instruction.welcome)
            case DirectAgent():
                connection.direct(instruction)
            case RefuseAgent(_, reason, key_fingerprint, generation):
                _log(connection, logging.WARNING, "agent refused: %s", reason)
                connection.close(AgentRefused(reason=reason, key_fingerprint=key_fingerprint, generation=generation))

    def job_ended(self, job_id: str) -> None:
        for agent_id in [agent for agent, job in self._jobs_of_agents.items() if job == job_id]:
            if agent_id not in self._connections:
                del self._jobs_of_agents[agent_id]

    def stop(self) -> None:
        """Closes every connection; the agents come back to the next daemon."""
        self._stopping = True
        for connection in self._connections.values():
            connection.close()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/agent."""
        assert self._loop is not None, "attach comes first"
        if self._loop.overloaded or self._stopping:
            raise web.HTTPServiceUnavailable(text="the daemon is busy or stopping: come back in a moment")
        socket = web.WebSocketResponse(timeout=CLOSE_TIMEOUT_S, max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        try:
            await socket.prepare(request)
        except ConnectionResetError:  # it has hung up before it was answered
            raise web.HTTPServiceUnavailable from None
        try:
            connection = await self._admit(self._loop, socket, request)
        except (MessageRefused, NotAdmitted) as error:
            log.warning("agent refused: %s", error)
            with contextlib.suppress(OSError):
                await socket.send_bytes(TO_AGENT.encode(AgentRefused(reason=str(error))))
        except MungeError as error:
            log.error("an agent comes by munge and cannot be told from others: %s; it tries again", error.whole())
            await socket.close(code=aiohttp.WSCloseCode.TRY_AGAIN_LATER, message=b"munge is down on the head node")
            return socket
        else:
            if connection is not None:
                await self._converse(self._loop, socket, connection)
        await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY if self._stopping else aiohttp.WSCloseCode.OK)
        return socket

    async def _admit(self, loop: CoreLoop, socket: web.WebSocketResponse, request: web.Request) -> AgentConnection | None:
        """None if the agent left before it had said who it is. Raises MessageRefused, NotAdmitted, MungeError."""
        try:
            hello = await _receive(socket, HELLO_TIMEOUT_S)
        except TimeoutError:
            raise MessageRefused(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if hello is None:
            return None
        if not isinstance(hello, AgentHello):
            raise MessageRefused(f"the first message was {type(hello).__name__}, expected AgentHello")
        if reason := check_protocol(hello.protocol):
            raise NotAdmitted(reason)
        peer = peer_uid(request)
        by_munge = await self._by_munge(hello) if peer is None else None
        admission = self._admissions.admit(hello, by_munge if peer is None else peer, peer_address(request))
        place = Place(hello.node, hello.host, machine(request))
        if not hello.key_fingerprint:  # one whose ranks run is believed
            check_reach(place, [each.place for each in self._connections.values() if each.job_id == hello.job_id])
        if self._jobs_of_agents.setdefault(hello.agent_id, hello.job_id) != hello.job_id:
            raise NotAdmitted(f"agent id {hello.agent_id} is in use by another job: start the agent again")
        seal = None if by_munge is None else (lambda welcome: self._proofs.sealed(welcome, hello, by_munge))
        connection = AgentConnection(hello, admission.uid, place, seal)
        before = self._connections.get(hello.agent_id)
        self._connections[hello.agent_id] = connection
        if before is not None:
            before.close()
        proven = msgspec.structs.replace(hello, uid=admission.uid, token="", credential="")

        def event(now: float) -> list[Instruction]:
            instructions = loop.core.agent_hello(now, proven, admission.job_key)
            self._admissions.settled(hello.job_id)
            return instructions

        loop.post(event)
        _log(connection, logging.INFO, "agent connected")
        return connection

    async def _by_munge(self, hello: AgentHello) -> int | None:
        """The user that the credential proves; None if a token has to. Raises NotAdmitted, MungeError."""
        try:
            return await self._proofs.agent_uid(hello)
        except MungeError:
            if hello.token and self._proofs.tokens:
                return None
            raise

    async def _converse(self, loop: CoreLoop, socket: web.WebSocketResponse, connection: AgentConnection) -> None:
        sender = asyncio.create_task(connection.send_all(socket), name=f"to agent {connection.agent_id}")
        receiver = asyncio.create_task(self._receive_all(loop, socket, connection), name=f"from agent {connection.agent_id}")
        try:
            await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
            if receiver.done() and isinstance(receiver.exception(), MessageRefused):
                connection.close(AgentRefused(reason=str(receiver.exception())))
                await asyncio.wait((sender,), timeout=SEND_TIMEOUT_S)
        finally:
            for task in (sender, receiver):
                task.cancel()
            outcome = await asyncio.gather(sender, receiver, return_exceptions=True)
            errors = [end for end in outcome if isinstance(end, Exception)]
            for error in errors:
                if not isinstance(error, _ENDS):
                    log.error("a bug ends the agent's connection: %r", error, exc_info=error, extra=_fields(connection))
            self._drop(loop, connection, next((str(error) or type(error).__name__ for error in errors), ""))

    def _drop(self, loop: CoreLoop, connection: AgentConnection, reason: str) -> None:
        if self._connections.get(connection.agent_id) is not connection:
            return  # it has a newer connection
        del self._connections[connection.agent_id]
        if not self._stopping:
            _log(connection, logging.INFO, "agent's connection closed%s", f": {reason}" if reason else "")
            loop.post(lambda now: loop.core.agent_gone(now, connection.agent_id))

    async def _receive_all(self, loop: CoreLoop, socket: web.WebSocketResponse, connection: AgentConnection) -> None:
        """Until the agent leaves. Raises MessageRefused for what does not belong here, TimeoutError after a long silence."""
        free = asyncio.Semaphore(STORE_REQUESTS_OPEN)
        while (message := await _receive(socket, SILENCE_LIMIT_S)) is not None:
            match message:
                case AgentStatus():
                    _check_status(message, connection)
                    loop.post_status(message)
                case StoreRequest():
                    await free.acquire()

                    def answer(reply: StoreReply) -> None:
                        free.release()
                        connection.send(reply)

                    self._stores.request(connection.job_id, message, answer)
                case AgentHello():
                    raise MessageRefused("a second hello on the same connection")


def _check_status(status: AgentStatus, connection: AgentConnection) -> None:
    """An agent's word counts for itself and its own job only. Raises MessageRefused."""
    if status.agent_id != connection.agent_id:
        raise MessageRefused(f"a status of agent {status.agent_id} on the connection of agent {connection.agent_id}")
    for process in status.processes:
        if process.rank is not None and (process.rank.job_id, process.rank.incarnation) != (
            connection.job_id,
            process.incarnation,
        ):
            raise MessageRefused(
                f"process {process.incarnation} of job {connection.job_id} carries a status of {process.rank.incarnation} "
                f"of job {process.rank.job_id}"
            )


async def _receive(socket: web.WebSocketResponse, timeout_s: float) -> AgentHello | AgentStatus | StoreRequest | None:
    """The next message, None at the end. Raises MessageRefused, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        message = await socket.receive()
    if message.type is aiohttp.WSMsgType.BINARY:
        return FROM_AGENT.decode(message.data)
    if message.type is aiohttp.WSMsgType.TEXT:
        raise MessageRefused("a text message, where all are binary")
    if message.type is aiohttp.WSMsgType.ERROR:
        raise MessageRefused(f"unreadable: {message.data}")
    return None


def _log(connection: AgentConnection, level: int, text: str, *arguments: object) -> None:
    log.log(level, text, *arguments, extra=_fields(connection))


def _fields(connection: AgentConnection) -> dict[str, object]:
    return {"job": connection.job_id, "node": connection.node, "agent": connection.agent_id, "uid": connection.uid}
