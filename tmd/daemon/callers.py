"""What somebody who only connects can take from the daemon: a connection for some seconds, and from the network only so many.

Else descriptors would run out, for the ledger and for the unix socket as well, by whoever reaches the port and proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time

from aiohttp import web
from aiohttp.typedefs import Handler

log = logging.getLogger("tmd.daemon")

#: The head of a connection's first request must have come by then; aiohttp itself waits for it without end.
REQUEST_TIMEOUT_S = 10.0
_HEARING_S = 1.0
#: Connections have this long to end by themselves when the daemon stops.
STOP_TIMEOUT_S = 3.0
#: One line in this time about connections that are turned away.
QUIET_S = 60.0


def half_of_the_descriptors() -> int:
    """How many connections from the network are taken: the rest is for the ledger, the unix socket and local nodes."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Callers:
    """Makes what speaks to each connection of one listener. `most`: how many may be open, None for any number."""

    def __init__(self, app: web.Application, most: int | None) -> None:
        self.runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=STOP_TIMEOUT_S)
        self._most = most
        self._silent: set[object] = set()
        self._quiet_until_s = 0.0
        app.middlewares.append(self._heard)

    def __call__(self) -> asyncio.BaseProtocol:
        server = self.runner.server
        assert server is not None, "set up by whoever listens"
        if self._most is not None and len(server.connections) >= self._most:
            self._tell()
            return _TurnedAway()
        handler = server()
        self._silent.add(handler)
        loop = asyncio.get_running_loop()
        # In two steps: after a stall of this process a request that came meanwhile is heard only after the first one.
        loop.call_later(REQUEST_TIMEOUT_S, lambda: loop.call_later(_HEARING_S, self._end_if_silent, handler))
        return handler

    @web.middleware
    async def _heard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._silent.discard(request.protocol)
        return await handler(request)

    def _end_if_silent(self, handler: web.RequestHandler) -> None:
        if handler in self._silent:
            self._silent.discard(handler)
            if handler.transport is not None:
                handler.transport.abort()

    def _tell(self) -> None:
        if time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + QUIET_S
            log.warning(
                "%d connections over TCP are open, half of what this process may have: more are turned away; find out who holds "
                "them (ss -tnp), or raise LimitNOFILE in the unit",
                self._most,
            )


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
