"""Between the resource manager and the core: what the pool of standby nodes has."""

from __future__ import annotations

import logging
from typing import Protocol

from tmd.core.pool import Pool
from tmd.daemon.loop import CoreLoop
from tmd.daemon.repeated_question import RepeatedQuestion
from tmd.ledger.reading import JOB_ENDED

log = logging.getLogger("tmd.daemon")

#: Pause between two looks: while jobs live, and while none does or the manager does not answer.
POLL_S, IDLE_S = 1.0, 10.0


class PoolSource(Protocol):
    """What is asked."""

    async def look(self) -> Pool:
        """Also ends what was taken from the pool and is nobody's any more. Raises ResourceManagerError."""
        ...


class PoolFeed(RepeatedQuestion[Pool]):
    """Tells the core of every change."""

    unknown = "what the pool has"

    def __init__(self, source: PoolSource, loop: CoreLoop) -> None:
        super().__init__()
        self._source = source
        self._loop = loop

    async def ask(self) -> Pool:
        return await self._source.look()

    def tell(self, word: Pool, before: Pool | None) -> None:
        if before is None or word.problem != before.problem:
            log.log(
                logging.WARNING if word.problem else logging.INFO,
                "the pool is reservation %s: %s",
                word.name,
                word.problem or f"{len(word.nodes)} nodes, {len(word.free)} of them free",
            )
        self._loop.post(lambda now: self._loop.core.pool(now, word))

    def pause_s(self, *, silent: bool) -> float:
        live = any(view.record.state not in JOB_ENDED for view in self._loop.core.jobs())
        return POLL_S if live and not silent else IDLE_S
