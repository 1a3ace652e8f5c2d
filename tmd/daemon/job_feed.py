"""Between the resource manager and the core: what each job holds, where jobs hold nodes of their own (Slurm)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from tmd.core.allocation import Allocation
from tmd.daemon.loop import CoreLoop
from tmd.ledger.reading import JOB_ENDED
from tmd.nodes.base import ResourceManagerError

log = logging.getLogger("tmd.daemon")

#: Pause between two questions; and at most, while the manager does not answer.
POLL_S, RETRY_LONGEST_S = 0.5, 10.0


class AllocationSource(Protocol):
    """What is asked."""

    async def allocations(self, job_ids: Collection[str]) -> list[Allocation]:
        """One for each of these jobs, by the names that their agents use. Raises ResourceManagerError."""
        ...


class JobFeed:
    """Tells the core of every change. While the manager does not answer nothing is told, so the last word stands."""

    def __init__(self, source: AllocationSource, loop: CoreLoop) -> None:
        self._source = source
        self._loop = loop
        self._told: dict[str, Allocation] = {}

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = POLL_S
        while True:
            live = [view.record.job_id for view in self._loop.core.jobs() if view.record.state not in JOB_ENDED]
            self._told = {job_id: word for job_id, word in self._told.items() if job_id in live}
            try:
                words = await self._source.allocations(live) if live else []
            except ResourceManagerError as error:
                if pause_s == POLL_S:
                    log.error("what jobs hold is not known, the resource manager does not answer: %s; asking again", error)
                pause_s = min(2 * pause_s, RETRY_LONGEST_S)
            else:
                pause_s = POLL_S
                for word in words:
                    self._tell(word)
            await asyncio.sleep(pause_s)

    def _tell(self, word: Allocation) -> None:
        before = self._told.get(word.job_id)
        if word == before:
            return
        self._told[word.job_id] = word
        fields = {"job": word.job_id}
        log.info(
            "allocation is %s: %s%s", word.state, ",".join(word.nodes), f" ({word.reason})" if word.reason else "", extra=fields
        )
        self._loop.post(lambda now: self._loop.core.allocation(now, word))
