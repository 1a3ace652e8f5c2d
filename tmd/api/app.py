"""The two HTTP applications: for the unix socket, where the kernel says who asks, and for TCP, where munge does."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from tmd.api import acting, health, reading
from tmd.api.authentication import by_munge
from tmd.api.context import CONTEXT, ApiError, Context, say_errors

_BODY_LIMIT_BYTES = 256 << 10


def unix_app(context: Context, more_routes: Iterable[web.AbstractRouteDef] = ()) -> web.Application:
    """`more_routes`: what the resource manager adds."""
    app = _app(context)
    app.add_routes(more_routes)
    return app


def tcp_app(context: Context) -> web.Application:
    """Whoever proves to be somebody may do what that user may. Local nodes are steered on their own machine."""
    app = _app(context, by_munge)
    app.router.add_route("*", "/v1/local/{rest:.*}", _not_from_afar)
    return app


def _app(context: Context, *more_middlewares: Middleware) -> web.Application:
    app = web.Application(middlewares=[say_errors, *more_middlewares], client_max_size=_BODY_LIMIT_BYTES)
    app[CONTEXT] = context
    app.add_routes(reading.routes)
    app.add_routes(acting.routes)
    app.add_routes(health.routes)
    app.router.add_get("/v1/agent", context.hub.serve)
    return app


async def _not_from_afar(request: web.Request) -> web.StreamResponse:
    raise ApiError(
        403, f"{request.path}: local nodes are steered on the daemon's own machine", "run tmctl there, without --daemon"
    )
