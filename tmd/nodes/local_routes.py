"""The HTTP side of a local cluster: jobs are started here, and nodes suffer what an operator wants them to suffer.

Contract: paths below /v1/local; errors are {"error", "remedy"}. Whoever starts a job runs code as the daemon's user, so all
of it is for that user and root, over the unix socket.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tmd.nodes.base import NodeView, RequestRefused, ResourceManagerError, UnknownJob, UnknownNode
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import JobRequest, LocalJob

_CREDENTIALS = struct.Struct("3i")
_Body = TypeVar("_Body")
_Handler = Callable[[web.Request], Awaitable[web.Response]]


def local_routes(cluster: LocalCluster) -> list[web.RouteDef]:
    """The routes, for Application.add_routes."""
    node_actions: dict[str, Callable[[str, str], Awaitable[Any]]] = {
        "kill": lambda node, _: cluster.kill(node),
        "freeze": lambda node, _: cluster.freeze(node),
        "thaw": lambda node, _: cluster.thaw(node),
        "down": lambda node, reason: cluster.set_down(node, reason or "set down by an operator"),
        "up": lambda node, _: cluster.come_back(node),
    }

    async def submit(request: web.Request) -> web.Response:
        job_id = await cluster.submit(await _read(request, JobRequest))
        return _answer(_job_view(cluster.job(job_id)), status=201)

    async def show(request: web.Request) -> web.Response:
        return _answer(_job_view(cluster.job(request.match_info["job"])))

    async def cancel(request: web.Request) -> web.Response:
        await cluster.cancel(request.match_info["job"])
        return _answer(_job_view(cluster.job(request.match_info["job"])))

    async def act(request: web.Request) -> web.Response:
        node, action = request.match_info["node"], request.match_info["action"]
        body = await _read(request, NodeRequest) if request.can_read_body else NodeRequest()
        await node_actions[action](node, body.reason)
        return _answer(_node_view(next(view for view in await cluster.nodes() if view.name == node)))

    return [
        web.post("/v1/local/jobs", _guarded(submit)),
        web.get("/v1/local/jobs/{job}", _guarded(show)),
        web.post("/v1/local/jobs/{job}/cancel", _guarded(cancel)),
        web.post("/v1/local/nodes/{node}/{action:" + "|".join(node_actions) + "}", _guarded(act)),
    ]


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a node's action; may be left out."""

    reason: str = ""


class _BadRequest(Exception):
    """The body is not what is expected."""


async def _read(request: web.Request, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise _BadRequest(f"request not understood: {error}") from None


def _answer(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _refuse(status: int, error: object, remedy: str) -> web.Response:
    return _answer({"error": str(error), "remedy": remedy}, status=status)


def _guarded(handler: _Handler) -> _Handler:
    """Lets only the daemon's own user and root in, and says errors in words."""

    async def guarded(request: web.Request) -> web.Response:
        uid = _peer_uid(request)
        if uid not in (0, os.geteuid()):
            who = "a request over TCP" if uid is None else f"uid {uid}"
            remedy = "run tmctl as that user or root, on this machine, over the unix socket"
            return _refuse(403, f"local nodes run as uid {os.geteuid()}: {who} may not touch them", remedy)
        try:
            return await handler(request)
        except _BadRequest as error:
            return _refuse(400, error, "see tmctl local run --help")
        except (UnknownNode, UnknownJob) as error:
            return _refuse(404, error, error.remedy)
        except RequestRefused as error:
            return _refuse(409, error, error.remedy)
        except ResourceManagerError as error:
            return _refuse(503, error, error.remedy)

    return guarded


def _peer_uid(request: web.Request) -> int | None:
    """Who is at the other end of a unix socket; None if it is not one."""
    peer = request.transport.get_extra_info("socket") if request.transport is not None else None
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _node_view(view: NodeView) -> dict[str, Any]:
    return {"node": view.name, "state": view.state, "address": view.address, "reason": view.reason, "jobs": view.jobs}


def _job_view(job: LocalJob) -> dict[str, Any]:
    request = job.request
    agents = [
        {
            "node": life.node,
            "life": life.number,
            "pid": life.pid,
            "exit_code": life.exit_code,
            "running": life.ended_s is None,
            "log": life.log,
            "started_s": life.started_s,
            "ended_s": life.ended_s,
        }
        for life in job.lives
    ]
    return {
        "job_id": job.job_id,
        "nnodes": request.nnodes,
        "standby": request.standby,
        "nproc_per_node": request.nproc_per_node,
        "command": request.command,
        "created_s": job.created_s,
        "agents": agents,
    }
