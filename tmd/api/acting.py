"""The routes that change something. Each answers once the decision is in the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from tmd.api.context import CONTEXT, ApiError, Caller, Context, answer, read_body
from tmd.api.reading import find_job, find_migration, job_json
from tmd.core.instructions import Instruction
from tmd.core.views import JobView
from tmd.daemon.admission import check_name

log = logging.getLogger("tmd.api")

routes = web.RouteTableDef()


class MigrationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/migrations."""

    job: str
    node: str | None = None
    rank: int | None = None
    to_node: str | None = None
    dry_run: bool = False


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/nodes/NODE/drain."""

    reason: str


@routes.post("/v1/migrations")
async def request_migration(request: web.Request) -> web.Response:
    """Body: MigrationRequest. 201 with the migration, or with `dry_run` 200 and what would be done. 400, 403, 404; 409 if it
    cannot be."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    wanted = await read_body(request, MigrationRequest)
    if (wanted.node is None) == (wanted.rank is None):
        raise ApiError(400, "a migration replaces either a node or a rank", "give exactly one of node and rank")
    view = await find_job(context, caller, wanted.job)
    _check_target(view, wanted)
    if context.core.job(wanted.job) is None:
        raise ApiError(409, f"job {wanted.job} is {view.record.state}: there is nothing to migrate", "see tmctl jobs")
    target: dict[str, Any] = {"node": wanted.node, "rank": wanted.rank, "to_node": wanted.to_node}
    if wanted.dry_run:
        explained = await context.loop.ask(lambda now: (context.core.explain_migration(now, wanted.job, **target), []))
        return answer({"explanation": explained})
    migration_id = await context.loop.ask(lambda now: context.core.request_migration(now, wanted.job, **target, who=caller.name))
    log.info("migration asked for by %s", caller.name, extra={"job": wanted.job, "migration": migration_id})
    migration = await find_migration(context, caller, migration_id)
    return answer({"migration_id": migration_id, "migration": migration}, status=201)


@routes.post("/v1/migrations/{migration}/abort")
async def abort_migration(request: web.Request) -> web.Response:
    """409 if it has flipped or ended, or replaces ranks that are lost."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    migration_id = request.match_info["migration"]
    await find_migration(context, caller, migration_id)
    await _decide(context, lambda now: context.core.abort_migration(now, migration_id, caller.name))
    return answer(await find_migration(context, caller, migration_id))


@routes.post("/v1/jobs/{job}/cancel")
async def cancel_job(request: web.Request) -> web.Response:
    """Ends every process of the job. 409 if it has ended already."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    job_id = request.match_info["job"]
    view = await find_job(context, caller, job_id)
    if context.core.job(job_id) is None:
        raise ApiError(409, f"job {job_id} is {view.record.state} already")
    await _decide(context, lambda now: context.core.cancel_job(now, job_id, caller.name))
    return answer(job_json(await find_job(context, caller, job_id)))


@routes.post("/v1/jobs/{job}/token")
async def make_token(request: web.Request) -> web.Response:
    """For the job's owner; of a job that is not there yet, the caller becomes the owner when its first agent shows it."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    job_id = request.match_info["job"]
    check_name("job id", job_id)
    view = context.core.job(job_id)
    if view is not None and not caller.may_see(view.record):
        raise ApiError(403, f"job {job_id} is not yours", "ask its owner or an operator")
    owner = view.record.owner_uid if view is not None else caller.uid
    return answer({"token": context.tokens.token(job_id, owner)})


@routes.post("/v1/nodes/{node}/drain")
async def drain_node(request: web.Request) -> web.Response:
    """Body: DrainRequest. Operators only. Every job's ranks on the node are moved, then it is given back."""
    context = request.app[CONTEXT]
    caller = context.operator(request)
    reason = (await read_body(request, DrainRequest)).reason.strip()
    if not reason:
        raise ApiError(400, "a drain needs a reason", "say why, for whoever finds the node drained: --reason 'bad DIMM'")
    node = request.match_info["node"]
    await context.manager.drain(node, f"{reason} ({caller.name})")
    return await _node_answer(context, caller, node, "drained")


@routes.post("/v1/nodes/{node}/resume")
async def resume_node(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    caller = context.operator(request)
    node = request.match_info["node"]
    await context.manager.resume(node)
    return await _node_answer(context, caller, node, "resumed")


@routes.post("/v1/pause")
async def pause(request: web.Request) -> web.Response:
    return await _set_paused(request, True)


@routes.post("/v1/unpause")
async def unpause(request: web.Request) -> web.Response:
    return await _set_paused(request, False)


async def _set_paused(request: web.Request, paused: bool) -> web.Response:
    context = request.app[CONTEXT]
    caller = context.operator(request)
    await _decide(context, lambda now: context.core.set_paused(now, paused, caller.name))
    log.warning("%s by %s", "paused" if paused else "no longer paused", caller.name)
    return answer({"paused": context.loop.paused})


async def _decide(context: Context, event: Callable[[float], list[Instruction]]) -> None:
    await context.loop.ask(lambda now: (None, event(now)))


async def _node_answer(context: Context, caller: Caller, node: str, what: str) -> web.Response:
    log.warning("node %s by %s", what, caller.name, extra={"node": node})
    view = next((view for view in await context.manager.nodes() if view.name == node), None)
    return answer({"node": node, "state": view.meaning if view is not None else "unknown"})


def _check_target(view: JobView, wanted: MigrationRequest) -> None:
    """Raises ApiError 404 for a rank or node that the job does not have."""
    record = view.record
    if wanted.rank is not None and not 0 <= wanted.rank < record.world_size:
        raise ApiError(404, f"job {record.job_id} has no rank {wanted.rank}: it has ranks 0 to {record.world_size - 1}")
    nodes = sorted(node.node for node in view.nodes)
    for node in (wanted.node, wanted.to_node):
        if node is not None and nodes and node not in nodes:
            raise ApiError(404, f"job {record.job_id} has no node {node}: its nodes are {', '.join(nodes)}")
