"""Between the resource manager and the core: what the pool of standby nodes has."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from tmd.core.pool import Pool
from tmd.daemon.loop import CoreLoop
from tmd.ledger.reading import JOB_ENDED
from tmd.nodes.base import ResourceManagerError

log = logging.getLogger("tmd.daemon")

#: Pause between two looks: while jobs live, and while none does or the manager does not answer.
POLL_S, IDLE_S = 1.0, 10.0


class PoolSource(Protocol):
    """What is asked."""

    async def look(self) -> Pool:
        """Also ends what was taken from the pool and is nobody's any more. Raises ResourceManagerError."""
        ...


class PoolFeed:
    """Tells the core of every change. While the manager does not answer nothing is told, so the last word stands."""

    def __init__(self, source: PoolSource, loop: CoreLoop) -> None:
        self._source = source
        self._loop = loop
        self._told: Pool | None = None
        self._silent = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            live = any(view.record.state not in JOB_ENDED for view in self._loop.core.jobs())
            try:
                word = await self._source.look()
            except ResourceManagerError as error:
                if not self._silent:
                    log.error("what the pool has is not known, the resource manager does not answer: %s; asking again", error)
                self._silent = True
            else:
                self._silent = False
                self._tell(word)
            await asyncio.sleep(POLL_S if live and not self._silent else IDLE_S)

    def _tell(self, word: Pool) -> None:
        if word == self._told:
            return
        if self._told is None or word.problem != self._told.problem:
            log.log(
                logging.WARNING if word.problem else logging.INFO,
                "the pool is reservation %s: %s",
                word.name,
                word.problem or f"{len(word.nodes)} nodes, {len(word.free)} of them free",
            )
        self._told = word
        self._loop.post(lambda now: self._loop.core.pool(now, word))
