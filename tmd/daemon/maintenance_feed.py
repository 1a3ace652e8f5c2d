"""Between the resource manager and the core: the maintenance that it has announced (Slurm: reservations)."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from tmd.core.maintenance import Maintenance
from tmd.daemon.loop import CoreLoop
from tmd.nodes.base import ResourceManagerError

log = logging.getLogger("tmd.daemon")

#: Pause between two questions: short beside the time by which nodes are left before maintenance begins.
POLL_S = 5.0


class MaintenanceSource(Protocol):
    """What is asked."""

    async def maintenance(self) -> list[Maintenance]:
        """All that is announced or has begun. Raises ResourceManagerError."""
        ...


class MaintenanceFeed:
    """Tells the core of every change. While the manager does not answer nothing is told, so the last word stands."""

    def __init__(self, source: MaintenanceSource, loop: CoreLoop) -> None:
        self._source = source
        self._loop = loop
        self._told: list[Maintenance] | None = None
        self._silent = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                announced = await self._source.maintenance()
            except ResourceManagerError as error:
                if not self._silent:
                    log.error("whether maintenance is announced is not known: %s; asking again", error)
                self._silent = True
            else:
                self._silent = False
                self._tell(announced)
            await asyncio.sleep(POLL_S)

    def _tell(self, announced: list[Maintenance]) -> None:
        if announced == self._told:
            return
        for each in announced if self._told is None else [each for each in announced if each not in self._told]:
            log.info("%s: %s", each.reason, ",".join(each.nodes))
        self._told = announced
        self._loop.post(lambda now: self._loop.core.maintenance(now, announced))
