"""Between the resource manager and the core: the maintenance that it has announced (Slurm: reservations)."""

from __future__ import annotations

import logging
from typing import Protocol

from tmd.core.maintenance import Maintenance
from tmd.daemon.loop import CoreLoop
from tmd.daemon.repeated_question import RepeatedQuestion

log = logging.getLogger("tmd.daemon")

#: Pause between two questions: short beside the time by which nodes are left before maintenance begins.
POLL_S = 5.0


class MaintenanceSource(Protocol):
    """What is asked."""

    async def maintenance(self) -> list[Maintenance]:
        """All that is announced or has begun. Raises ResourceManagerError."""
        ...


class MaintenanceFeed(RepeatedQuestion[list[Maintenance]]):
    """Tells the core of every change."""

    unknown = "whether maintenance is announced"

    def __init__(self, source: MaintenanceSource, loop: CoreLoop) -> None:
        super().__init__()
        self._source = source
        self._loop = loop

    async def ask(self) -> list[Maintenance]:
        return await self._source.maintenance()

    def tell(self, word: list[Maintenance], before: list[Maintenance] | None) -> None:
        for each in word:
            if each not in (before or ()):
                log.info("%s: %s", each.reason, ",".join(each.nodes))
        self._loop.post(lambda now: self._loop.core.maintenance(now, word))

    def pause_s(self, *, silent: bool) -> float:
        return POLL_S
