"""What the routes work with, who is calling, and how an error becomes an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from tmd.config import Config
from tmd.core.daemon import DaemonCore, Refused
from tmd.core.records import JobRecord
from tmd.daemon.admission import NotAdmitted, Tokens
from tmd.daemon.agents import AgentHub
from tmd.daemon.identity import caller_uid, user_name
from tmd.daemon.loop import CoreLoop, NotDurable
from tmd.daemon.proofs import Proofs
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger
from tmd.nodes.base import RequestRefused, ResourceManager, ResourceManagerError, UnknownJob, UnknownNode

log = logging.getLogger("tmd.api")

_Body = TypeVar("_Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An answer that is not what was asked for: what is wrong, and what to do about it."""

    def __init__(self, status: Literal[400, 403, 404, 409, 503], error: str, remedy: str = "") -> None:
        super().__init__(error)
        self.status = status
        self.remedy = remedy


class Changes:
    """Wakes everybody who waits for something to have changed in the ledger."""

    def __init__(self) -> None:
        self._bell = asyncio.Event()

    def ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Returns at the next change, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel (unix socket) or munge (TCP) says."""

    uid: int
    #: Root, the daemon's own user or a configured operator.
    operator: bool

    @property
    def name(self) -> str:
        """For the records."""
        return user_name(self.uid)

    def may_see(self, job: JobRecord | None) -> bool:
        return self.operator or (job is not None and job.owner_uid == self.uid)


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The running daemon, as the routes see it."""

    config: Config
    loop: CoreLoop
    ledger: Ledger
    hub: AgentHub
    manager: ResourceManager
    tokens: Tokens
    operators: frozenset[int]
    changes: Changes
    started_s: float
    proofs: Proofs = dataclasses.field(default_factory=Proofs)
    caller_uid: Callable[[web.Request], int | None] = caller_uid

    @property
    def core(self) -> DaemonCore:
        return self.loop.core

    def caller(self, request: web.Request) -> Caller:
        """Raises ApiError if the connection does not say who it is."""
        uid = self.caller_uid(request)
        if uid is None:
            raise ApiError(
                403,
                f"{request.method} {request.path}: over TCP a munge credential has to say who asks",
                "use tmctl --daemon on a machine with the cluster's munge, or the daemon's unix socket on the head node",
            )
        return Caller(uid, uid in self.operators)

    def operator(self, request: web.Request) -> Caller:
        """Raises ApiError for anybody else."""
        caller = self.caller(request)
        if not caller.operator:
            raise ApiError(
                403,
                f"{request.method} {request.path} is for operators, {user_name(caller.uid)} is none",
                "ask an operator, or have yourself added to daemon.operators in the daemon's configuration",
            )
        return caller


CONTEXT = web.AppKey("context", Context)


async def read_body(request: web.Request, kind: type[_Body]) -> _Body:
    """Raises ApiError with what was expected. No body counts as an empty object."""
    try:
        body = await request.read()
    except (ConnectionError, web.RequestPayloadError) as error:
        raise ApiError(400, f"{request.method} {request.path}: the request's body did not arrive whole: {error}") from None
    except web.HTTPRequestEntityTooLarge:
        text = f"{request.method} {request.path}: the request is larger than {request.client_max_size >> 10} KiB"
        raise ApiError(400, text, "shorten what it carries: a reason, or the command and environment of a job") from None
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"{request.method} {request.path}: {error}", f"expected a JSON object with {_fields(kind)}") from None


def query_number(request: web.Request, name: str, default: float, most: float) -> float:
    """A number from the query, cut to `most`. Raises ApiError."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ApiError(400, f"{name}={text}: expected a number that is not negative")
    return min(value, most)


def answer(value: Any, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(msgspec.to_builtins(value, str_keys=True))
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def say_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is `{"error", "remedy"}` with the status that tmd.api names."""
    try:
        return await handler(request)
    except ApiError as error:
        return _refuse(error.status, error, error.remedy)
    except Refused as error:
        return _refuse(409, error)
    except NotAdmitted as error:
        return _refuse(400, error)
    except NotDurable as error:
        return _refuse(503, error, "nothing is done before it is written; look at the daemon's log and its disk, then ask again")
    except LedgerUnavailable as error:
        return _refuse(503, error, "jobs go on; repair the database (disk full? permissions? down?), then ask again")
    except (UnknownNode, UnknownJob) as error:
        return _refuse(404, error, error.remedy)
    except RequestRefused as error:
        return _refuse(409, error, error.remedy)
    except ResourceManagerError as error:
        return _refuse(503, error, error.remedy)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"{request.method} {request.path}: {error.text or error.reason}"
        return _refuse(error.status, what, "if tmctl asked: tmctl --version and tmctl status should name the same version")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        what = f"the daemon (pid {os.getpid()}) failed on {request.method} {request.path}"
        return _refuse(500, what, "its log has the traceback; please report it")


def _refuse(status: int, error: object, remedy: str = "") -> web.Response:
    return answer({"error": str(error), "remedy": remedy}, status=status)


def _fields(kind: type[msgspec.Struct]) -> str:
    return ", ".join(f"{field.name}{'' if field.required else '?'}" for field in msgspec.structs.fields(kind)) or "no fields"
