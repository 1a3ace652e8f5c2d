"""The routes of the compute nodes' health: reports come in, findings are shown. For operators, and for who has the reporters'
token."""

from __future__ import annotations

from aiohttp import web

from tmd.api.context import CONTEXT, ApiError, answer, read_body
from tmd.daemon.admission import check_name
from tmd.protocol.health import HealthReport

routes = web.RouteTableDef()

#: Of `Authorization`, where there is no munge.
TOKEN_SCHEME = "Token"


@routes.post("/v1/nodes/{node}/findings")
async def take_report(request: web.Request) -> web.Response:
    """Body: HealthReport. Answers with what stands of this node once that is in the ledger."""
    context = request.app[CONTEXT]
    _check_reporter(request)
    node = request.match_info["node"]
    check_name("node", node)
    report = await read_body(request, HealthReport)
    await context.loop.ask(lambda now: (None, context.core.health_report(now, node, report)))
    return answer({"findings": [view for view in context.core.findings() if view.node == node]})


@routes.get("/v1/findings")
async def list_findings(request: web.Request) -> web.Response:
    """Nodes belong to everybody: whoever is known may look."""
    context = request.app[CONTEXT]
    context.caller(request)
    return answer({"findings": context.core.findings()})


@routes.post("/v1/findings/token")
async def reporters_token(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    context.operator(request)
    return answer({"token": context.tokens.reporter()})


def _check_reporter(request: web.Request) -> None:
    """Raises ApiError for anybody who is neither an operator nor has the reporters' token."""
    context = request.app[CONTEXT]
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme != TOKEN_SCHEME:
        context.operator(request)
    elif not context.proofs.tokens:
        raise ApiError(403, "no token counts here (tcp_auth is munge)", "run tmd-health as root on a node with munge")
    elif not context.tokens.is_reporter(token):
        raise ApiError(403, "this is not the token of health reports", "on the head node: tmctl health token")
