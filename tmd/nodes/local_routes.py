"""The HTTP side of a local cluster: jobs are started here, and nodes suffer what an operator wants them to suffer.

Contract: paths below /v1/local, for an application with the middleware tmd.api.context.say_errors. Whoever starts a job runs
code as the daemon's user, so all of it is for that user and root, over the unix socket.

    POST /v1/local/jobs              JobRequest -> Job (201)
    GET  /v1/local/jobs/ID           Job
    POST /v1/local/jobs/ID/cancel    Job
    POST /v1/local/nodes/NODE/ACTION {"reason"?} -> Node; ACTION: kill, freeze, thaw, down, up

    Job  {"job_id", "nnodes", "standby", "nproc_per_node", "command", "created_s", "agents": [{"node", "life", "pid",
          "exit_code", "running", "log", "started_s", "ended_s"}]}: one agent for each life of a node in the job
    Node {"node", "state": "IDLE+DRAIN", "address", "reason", "jobs": [job id]}
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from tmd.api.context import ApiError, Handler, answer, read_body
from tmd.daemon.identity import peer_uid, user_name
from tmd.nodes.base import InvalidRequest, NodeView
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import JobRequest, LocalJob

#: For a job with its environment, as JSON: more than the kernel gives any program.
JOB_LIMIT_BYTES = 4 << 20


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a node's action; may be left out."""

    reason: str = ""


def local_routes(
    cluster: LocalCluster, *, caller_uid: Callable[[web.Request], int | None] = peer_uid
) -> list[web.AbstractRouteDef]:
    """The routes, for Application.add_routes."""
    node_actions: dict[str, Callable[[str, str], Awaitable[object]]] = {
        "kill": lambda node, _: cluster.kill(node),
        "freeze": lambda node, _: cluster.freeze(node),
        "thaw": lambda node, _: cluster.thaw(node),
        "down": lambda node, reason: cluster.set_down(node, reason or "set down by an operator"),
        "up": lambda node, _: cluster.come_back(node),
    }

    async def submit(request: web.Request) -> web.StreamResponse:
        wanted = await read_body(request.clone(client_max_size=JOB_LIMIT_BYTES), JobRequest)
        try:
            job_id = await cluster.submit(wanted)
        except InvalidRequest as error:
            raise ApiError(400, str(error), error.remedy) from None
        return answer(_job_view(cluster.job(job_id)), status=201)

    async def show(request: web.Request) -> web.StreamResponse:
        return answer(_job_view(cluster.job(request.match_info["job"])))

    async def cancel(request: web.Request) -> web.StreamResponse:
        await cluster.cancel(request.match_info["job"])
        return await show(request)

    async def act(request: web.Request) -> web.StreamResponse:
        node, action = request.match_info["node"], request.match_info["action"]
        await node_actions[action](node, (await read_body(request, NodeRequest)).reason)
        return answer(_node_view(next(view for view in await cluster.nodes() if view.name == node)))

    def guarded(handler: Handler) -> Handler:
        """Lets only the daemon's own user and root in."""

        async def handle(request: web.Request) -> web.StreamResponse:
            uid = caller_uid(request)
            if uid not in (0, os.geteuid()):
                who = "a caller over TCP" if uid is None else user_name(uid)
                text = f"local nodes run as {user_name(os.geteuid())}: {who} may not touch them"
                raise ApiError(403, text, "run tmctl as that user or root, over the unix socket")
            return await handler(request)

        return handle

    return [
        web.post("/v1/local/jobs", guarded(submit)),
        web.get("/v1/local/jobs/{job}", guarded(show)),
        web.post("/v1/local/jobs/{job}/cancel", guarded(cancel)),
        web.post("/v1/local/nodes/{node}/{action:" + "|".join(node_actions) + "}", guarded(act)),
    ]


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
