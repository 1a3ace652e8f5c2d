"""Who asks over TCP: a munge credential for exactly this request says so. Without one nobody is known, and the routes decide."""

from __future__ import annotations

from aiohttp import web

from tmd.api.context import CONTEXT, ApiError, Handler
from tmd.daemon.identity import PROVEN_UID
from tmd.munge.library import MungeDown, MungeError
from tmd.protocol.proofs import RequestProof, digest

SCHEME = "Munge"


@web.middleware
async def by_munge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises ApiError for a credential that proves nothing (403), or while it cannot be checked (503)."""
    scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
    if scheme == SCHEME:
        wanted = RequestProof(method=request.method, target=request.raw_path, body=digest(await request.read()))
        try:
            request[PROVEN_UID] = await request.app[CONTEXT].proofs.request_uid(wanted, credential.strip())
        except MungeDown as error:
            raise ApiError(503, f"on the head node: {error}", error.remedy) from None
        except MungeError as error:
            raise ApiError(403, str(error), error.remedy) from None
    return await handler(request)
