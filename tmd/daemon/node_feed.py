"""Between the resource manager and the core: node states in, released nodes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tmd.core.instructions import ReleaseNode
from tmd.core.records import NodeState
from tmd.daemon.loop import CoreLoop
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger
from tmd.nodes.base import NodeEvent, ResourceManager, ResourceManagerError, UnknownJob, UnknownNode

log = logging.getLogger("tmd.daemon")

RETRY_FIRST_S, RETRY_LONGEST_S = 0.5, 30.0


class NodeFeed:
    """Feeds the core with what the resource manager says of nodes. Silence of the manager makes them unknown, never clean."""

    def __init__(self, manager: ResourceManager, loop: CoreLoop) -> None:
        self._manager = manager
        self._loop = loop
        self._known: set[str] = set()
        #: The last that was said of each node beside "unknown".
        self._said: dict[str, tuple[NodeState, str]] = {}

    async def run(self) -> None:
        """Until the manager is closed."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async for event in self._manager.watch():
                    pause_s = RETRY_FIRST_S
                    self._known.add(event.node)
                    self._log(event)
                    self._post(event.node, event.state, event.reason)
                return
            except ResourceManagerError as error:
                log.error("node states unknown, the resource manager does not answer: %s; asking again in %.1f s", error, pause_s)
                for node in sorted(self._known):
                    self._post(node, "unknown", str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LONGEST_S)

    def _log(self, event: NodeEvent) -> None:
        """What is news of this node: not that it is up in the beginning, nor that it is unknown, as then all of them are."""
        before = self._said.get(event.node, ("up", ""))
        level = logging.INFO if event.state == "up" else logging.WARNING
        if event.state == "unknown" or (event.state, event.reason) == before:
            level = logging.DEBUG
        if event.state != "unknown":
            self._said[event.node] = (event.state, event.reason)
        reason = f": {event.reason}" if event.reason else ""
        log.log(level, "node is %s%s", event.state, reason, extra={"node": event.node})

    def _post(self, node: str, state: NodeState, reason: str) -> None:
        self._loop.post(lambda now: self._loop.core.node_state(now, node, state, reason))


class Releases:
    """Gives nodes back, for as long as it takes; what is left to do is in the ledger."""

    def __init__(self, manager: ResourceManager, ledger: Ledger, pending: Iterable[tuple[str, str, str]]) -> None:
        self._manager = manager
        self._ledger = ledger
        self._due = {(job, node): reason for job, node, reason in pending}
        self._bell = asyncio.Event()
        if self._due:
            self._bell.set()

    def add(self, release: ReleaseNode) -> None:
        self._due[release.job_id, release.node] = release.reason
        self._bell.set()

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = RETRY_FIRST_S
        while True:
            await self._bell.wait()
            self._bell.clear()
            for (job_id, node), reason in list(self._due.items()):
                if await self._give_back(job_id, node, reason):
                    del self._due[job_id, node]
            if self._due:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_LONGEST_S)
                self._bell.set()
            else:
                pause_s = RETRY_FIRST_S

    async def _give_back(self, job_id: str, node: str, reason: str) -> bool:
        """True if nothing is left to do."""
        fields = {"job": job_id, "node": node}
        try:
            await self._manager.release(job_id, node)
        except (UnknownNode, UnknownJob) as error:
            log.warning("node not given back, there is nothing to give: %s", error, extra=fields)
        except ResourceManagerError as error:
            log.error("node not given back yet: %s; trying again", error, extra=fields)
            return False
        try:
            await self._ledger.released(job_id, node)
        except LedgerUnavailable as error:
            log.error("node given back, but that is not in the ledger yet: %s; trying again", error, extra=fields)
            return False
        log.info("node given back: %s", reason, extra=fields)
        return True
