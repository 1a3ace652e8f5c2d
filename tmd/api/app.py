"""The two HTTP applications: everything for the unix socket, agents and health alone for TCP."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from tmd.api import acting, reading
from tmd.api.context import CONTEXT, Context, say_errors

_BODY_LIMIT_BYTES = 256 << 10


def unix_app(context: Context, more_routes: Iterable[web.AbstractRouteDef] = ()) -> web.Application:
    """`more_routes`: what the resource manager adds."""
    app = _app(context)
    app.add_routes(reading.routes)
    app.add_routes(acting.routes)
    app.add_routes(more_routes)
    return app


def tcp_app(context: Context) -> web.Application:
    """Nothing here without a token, but for the question whether the daemon is well."""
    app = _app(context)
    app.router.add_get("/v1/health", reading.health)
    return app


def _app(context: Context) -> web.Application:
    app = web.Application(middlewares=[say_errors], client_max_size=_BODY_LIMIT_BYTES)
    app[CONTEXT] = context
    app.router.add_get("/v1/agent", context.hub.serve)
    return app
