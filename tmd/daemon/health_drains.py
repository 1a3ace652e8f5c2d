"""Drains the nodes whose checks found what the policy does not let pass. All that follows is what follows from any drain."""

from __future__ import annotations

import asyncio
import logging

from tmd.daemon.loop import CoreLoop, NotDurable
from tmd.nodes.base import ResourceManager, ResourceManagerError

log = logging.getLogger("tmd.daemon")

#: The core is asked this often what it wants: a node may become free at any time.
LOOK_S = 0.5
#: After a drain that failed.
RETRY_S = 10.0


class HealthDrains:
    """Between the core and the resource manager."""

    def __init__(self, manager: ResourceManager, loop: CoreLoop) -> None:
        self._manager = manager
        self._loop = loop
        #: Node -> why it could not be drained: told when it changes, not with every attempt.
        self._in_the_way: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S if await self._drain_all() else RETRY_S)

    async def _drain_all(self) -> bool:
        """False if something has to be tried again."""
        if not self._loop.core.drains_wanted():
            return True
        try:
            # Asked in the loop's turn: what led to it is in the ledger then.
            wanted: dict[str, str] = await self._loop.ask(lambda now: (self._loop.core.drains_wanted(), []))
        except NotDurable as error:
            log.error("nodes are not drained for their health yet: %s", error)
            return False
        done = [await self._drain(node, reason) for node, reason in wanted.items()]
        return all(done)

    async def _drain(self, node: str, reason: str) -> bool:
        try:
            await self._manager.drain(node, f"tmd-health: {reason}")
        except ResourceManagerError as error:
            if self._in_the_way.get(node) != str(error):
                log.error("not drained for its health yet: %s (%s)", error, reason, extra={"node": node})
            self._in_the_way[node] = str(error)
            return False
        self._in_the_way.pop(node, None)
        log.warning("drained for its health: %s", reason, extra={"node": node})
        self._loop.post(lambda now: self._loop.core.health_drained(now, node, reason))
        return True
