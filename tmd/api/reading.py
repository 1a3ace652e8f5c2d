"""The routes that only look. What the core knows live comes first, older things from the ledger."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import msgspec
from aiohttp import web

import tmd
from tmd.api.context import CONTEXT, ApiError, Caller, Context, answer, query_number
from tmd.api.now import under_way
from tmd.core.costs import job_cost
from tmd.core.records import JobRecord
from tmd.core.views import JobView, MigrationView
from tmd.ledger.reading import MIGRATION_ENDED
from tmd.nodes.base import ResourceManagerError
from tmd.protocol.codec import PROTOCOL

routes = web.RouteTableDef()

WAIT_LIMIT_S = 60.0
#: No job has more migrations than this that anybody would add up.
_MIGRATIONS_OF_A_JOB = 100_000
#: A long poll looks again at least this often, for what changes without a write.
_LOOK_AGAIN_S = 1.0


@routes.get("/v1/health")
async def health(request: web.Request) -> web.Response:
    """The one route that anybody may ask."""
    context = request.app[CONTEXT]
    healthy = context.loop.failing_since_s is None
    return answer({"ok": healthy, "generation": context.ledger.generation}, status=200 if healthy else 503)


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    """The daemon itself: what it runs, how its ledger does, and a sentence for every object that the caller may see."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    jobs = [view for view in context.core.jobs() if caller.may_see(view.record)]
    return answer(
        {
            "tmd_version": tmd.__version__,
            "protocol": PROTOCOL,
            "generation": context.ledger.generation,
            "pid": os.getpid(),
            "started_s": context.started_s,
            "now_s": time.time(),
            "paused": context.loop.paused,
            "observe_only": context.config.core.observe_only,
            "resource_manager": context.config.daemon.resource_manager,
            "agents": len(context.hub),
            "jobs": Counter(view.record.state for view in jobs),
            "sentences": _sentences(context, caller, jobs),
            "now": under_way(context.core, caller),
            "ledger": {
                "url": context.ledger.shown_url,
                "healthy": context.loop.failing_since_s is None,
                "error": context.loop.failure,
                "failing_since_s": context.loop.failing_since_s,
                "writes": context.ledger.writes,
                "write_median_s": context.ledger.write_median_s,
                "write_max_s": context.ledger.write_max_s,
            },
        }
    )


@routes.get("/v1/jobs")
async def list_jobs(request: web.Request) -> web.Response:
    """Live jobs, then up to ?limit= that have ended, newest first."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    limit = int(query_number(request, "limit", 50, 1000))
    live = context.core.jobs()
    known = {view.record.job_id for view in live}
    older = [_ended(record) for record in await context.ledger.ended_jobs(limit) if record.job_id not in known]
    return answer({"jobs": [job_json(view) for view in [*live, *older] if caller.may_see(view.record)]})


@routes.get("/v1/jobs/{job}")
async def show_job(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return answer(job_json(await find_job(context, context.caller(request), request.match_info["job"])))


@routes.get("/v1/jobs/{job}/cost")
async def show_job_cost(request: web.Request) -> web.Response:
    """What its migrations cost it: see tmd.core.costs."""
    context = request.app[CONTEXT]
    view = await find_job(context, context.caller(request), request.match_info["job"])
    job_id = view.record.job_id
    migrations = await _migrations(context, job_id, _MIGRATIONS_OF_A_JOB)
    return answer(job_cost(job_id, view.record.world_size, [each.record for each in migrations]))


@routes.get("/v1/nodes")
async def list_nodes(request: web.Request) -> web.Response:
    """Every node of the resource manager and of any job. If the manager does not answer, `manager_error` says why and states are
    unknown."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    manager_error = ""
    nodes: dict[str, dict[str, Any]] = {}
    try:
        for node in await context.manager.nodes():
            nodes[node.name] = _node(node.name, node.meaning, node.state, node.address, node.labels, node.reason)
    except ResourceManagerError as error:
        manager_error = str(error)
    for use in context.core.nodes():
        record = use.record
        state = "unknown" if manager_error else use.state
        entry = nodes.setdefault(record.node, _node(record.node, state, "", "", record.labels, record.reason))
        if caller.may_see(_job_record(context, record.job_id)):
            entry["uses"].append(use)
    return answer({"nodes": list(nodes.values()), "manager_error": manager_error})


@routes.get("/v1/standbys")
async def list_standbys(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    caller = context.caller(request)
    visible = [view for view in context.core.standbys() if caller.may_see(_job_record(context, view.record.job_id))]
    return answer({"standbys": visible})


@routes.get("/v1/migrations")
async def list_migrations(request: web.Request) -> web.Response:
    """Newest first; ?job= and ?limit= narrow it down."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    job_id = request.query.get("job")
    limit = int(query_number(request, "limit", 100, 1000))
    if job_id is not None:
        await find_job(context, caller, job_id)
    views = await _migrations(context, job_id, limit)
    owners = {view.record.job_id: await job_record(context, view.record.job_id) for view in views}
    visible = [view for view in views if caller.may_see(owners[view.record.job_id])]
    visible.sort(key=lambda view: view.record.started_s, reverse=True)
    return answer({"migrations": visible[:limit]})


@routes.get("/v1/migrations/{migration}")
async def show_migration(request: web.Request) -> web.Response:
    """With ?wait= a long poll."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    migration_id = request.match_info["migration"]
    until = time.monotonic() + query_number(request, "wait", 0.0, WAIT_LIMIT_S)
    while True:
        view = await find_migration(context, caller, migration_id)
        left_s = until - time.monotonic()
        if view.record.state in MIGRATION_ENDED or left_s <= 0:
            return answer(view)
        await context.changes.wait(min(left_s, _LOOK_AGAIN_S))


@routes.get("/v1/story/{subject}")
async def tell_story(request: web.Request) -> web.Response:
    """The events about the subject and those that led to them, oldest first; up to ?limit=. 404 if there are none to be seen."""
    context = request.app[CONTEXT]
    caller = context.caller(request)
    subject = request.match_info["subject"]
    events = await context.ledger.story(subject, limit=int(query_number(request, "limit", 1000, 10_000)))
    owners = {event.job_id: await job_record(context, event.job_id) for event in events}
    visible = [event for event in events if caller.may_see(owners[event.job_id])]
    if not visible:
        raise ApiError(
            404,
            f"nothing is recorded about {subject}" + (" that you may see" if events else ""),
            "a story is told of a job, migration, incarnation or node id; see tmctl jobs, migrations, nodes",
        )
    return answer({"subject": subject, "events": visible})


# ---------------------------------------------------------------- look-ups, for the other routes too


async def find_job(context: Context, caller: Caller, job_id: str) -> JobView:
    """Raises ApiError 404, 403, or 409 for a job whose agents belong to another ledger."""
    view = context.core.job(job_id) or await _written_job(context, job_id)
    if view is None:
        stranger = context.core.stranger(job_id)
        if stranger is not None:
            raise ApiError(409, stranger, "tmctl status shows which jobs this ledger knows")
        known = [each.record.job_id for each in context.core.jobs() if caller.may_see(each.record)]
        raise ApiError(404, f"there is no job {job_id}", f"jobs here: {', '.join(known) or 'none'}")
    if not caller.may_see(view.record):
        raise ApiError(403, f"job {job_id} is not yours", "ask its owner or an operator")
    return view


async def find_migration(context: Context, caller: Caller, migration_id: str) -> MigrationView:
    """Raises ApiError 404 or 403."""
    view = _live_migration(context, migration_id) or await _written_migration(context, migration_id)
    if view is None:
        raise ApiError(404, f"there is no migration {migration_id}", "tmctl migrations lists them")
    if not caller.may_see(await job_record(context, view.record.job_id)):
        raise ApiError(403, f"migration {migration_id} is of a job that is not yours", "ask its owner or an operator")
    return view


async def _written_job(context: Context, job_id: str) -> JobView | None:
    """One that only the ledger remembers, because it has ended. But a job may also begin while the ledger is read: then the core
    knows more than the row that its first agent's hello wrote."""
    record = await context.ledger.job(job_id)
    return context.core.job(job_id) or (_ended(record) if record is not None else None)


async def _written_migration(context: Context, migration_id: str) -> MigrationView | None:
    record = await context.ledger.migration(migration_id)
    return _live_migration(context, migration_id) or (MigrationView(record=record) if record is not None else None)


async def _migrations(context: Context, job_id: str | None, limit: int) -> list[MigrationView]:
    """The live ones, and the newest `limit` of the ledger's; of this job or of all."""
    recorded = await context.ledger.migrations(job_id=job_id, limit=limit)
    views = {record.migration_id: MigrationView(record=record) for record in recorded}
    for view in context.core.migrations():
        if job_id in (None, view.record.job_id):
            views[view.record.migration_id] = view
    return list(views.values())


def _live_migration(context: Context, migration_id: str) -> MigrationView | None:
    return next((each for each in context.core.migrations() if each.record.migration_id == migration_id), None)


async def job_record(context: Context, job_id: str) -> JobRecord | None:
    return _job_record(context, job_id) or await context.ledger.job(job_id)


def _ended(record: JobRecord) -> JobView:
    """A job that only the ledger remembers."""
    return JobView(record=record, next_step=record.steps)


def job_json(view: JobView) -> dict[str, Any]:
    """Without the job key, which never leaves the daemon this way."""
    shown: dict[str, Any] = msgspec.to_builtins(view, str_keys=True)
    del shown["record"]["job_key"]
    return shown


def _job_record(context: Context, job_id: str) -> JobRecord | None:
    view = context.core.job(job_id)
    return view.record if view is not None else None


def _node(name: str, state: str, manager_state: str, address: str, labels: dict[str, str], reason: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "manager_state": manager_state,
        "address": address,
        "labels": labels,
        "reason": reason,
        "uses": [],
    }


def _sentences(context: Context, caller: Caller, jobs: list[JobView]) -> dict[str, str]:
    sentences = context.core.sentences()
    if caller.operator:
        return sentences
    own: set[str] = set()
    for job in jobs:
        own.add(job.record.job_id)
        own.update(rank.record.incarnation for rank in (*job.ranks, *job.standbys))
        own.update(migration.record.migration_id for migration in job.migrations)
        own.update(node.node for node in job.nodes)
    return {name: sentence for name, sentence in sentences.items() if name in own}
