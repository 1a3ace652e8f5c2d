"""The nodes of a Slurm cluster.

Contract: tmd.nodes.base.ResourceManager. slurmctld is the truth and is asked again and again; hints of its plugin only make tmd
ask at once. What it does not answer is unknown. An administrator's drain and reason are never touched. A job's node is given back
by making the job smaller, which Slurm allows the job's owner and operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path

from tmd.core.allocation import Allocation
from tmd.core.maintenance import Maintenance
from tmd.nodes.base import LEAVING_FLAGS, NodeEvent, NodeView, QueryFailed, RequestRefused, UnknownJob
from tmd.nodes.slurm import allocations
from tmd.nodes.slurm.client import SlurmClient, checked_node
from tmd.nodes.slurm.commands import CommandClient
from tmd.nodes.slurm.hints import HintSocket
from tmd.nodes.slurm.pool import SlurmPool
from tmd.nodes.slurm.records import SlurmJob, SlurmNode
from tmd.nodes.slurm.settings import SlurmSettings

log = logging.getLogger(__name__)


class SlurmNodes:
    """Implements tmd.nodes.base.ResourceManager. Use: `start`, then anything, then `close`."""

    def __init__(self, settings: SlurmSettings, client: SlurmClient) -> None:
        self._settings = settings
        self._client = client
        self._bell = asyncio.Event()
        self._closed = False
        self.pool = SlurmPool(settings, CommandClient(settings)) if settings.standby_reservation else None
        self._hints = HintSocket(Path(settings.hint_socket), self._ring) if settings.hint_socket else None

    async def start(self) -> None:
        """Raises OSError if there can be no hint socket."""
        if self._hints is not None:
            self._hints.open()

    async def close(self) -> None:
        self._closed = True
        self._ring()
        if self._hints is not None:
            self._hints.close()
        await self._client.close()

    # ---------------------------------------------------------------- the border

    async def nodes(self) -> list[NodeView]:
        nodes, jobs = await asyncio.gather(self._client.nodes(), self._client.jobs())
        holders: dict[str, list[str]] = {}
        for job in jobs:
            for name in job.held_nodes:
                holders.setdefault(name, []).append(job.life)
        return [node_view(node, tuple(holders.get(node.name, ()))) for node in sorted(nodes, key=lambda node: node.name)]

    async def drain(self, node: str, reason: str) -> None:
        found = await self._client.node(node)
        if "DRAIN" in found.flags or "FAIL" in found.flags:
            return
        # A node that is down has a reason already, and Slurm keeps but one.
        await self._client.set_drain(node, found.reason or reason)
        self._ring()

    async def resume(self, node: str) -> None:
        found = await self._client.node(node)
        if found.base != "DOWN" and LEAVING_FLAGS.isdisjoint(found.flags):
            raise RequestRefused(f"node {node} is not drained, it is {found.state}", "tmctl nodes")
        await self._client.set_resume(node)
        self._ring()

    async def release(self, job_id: str, node: str) -> None:
        checked_node(node)
        try:
            job = await self._client.job(job_id.partition(".")[0])
        except UnknownJob:
            return
        # The same number, requeued since, may hold the same node for another beginning.
        if job.life != job_id or node not in job.held_nodes or job.state == "COMPLETING":
            return
        if self.pool is not None and await self.pool.end_companion(job.job_id):
            return
        await self.shrink(job, node)

    async def shrink(self, job: SlurmJob, node: str) -> None:
        """Takes one node from a running job; what the job still runs there is killed by Slurm.

        Raises RequestRefused for the node of the batch script, which Slurm lets no job give away, and for a job's last node.
        """
        remaining = tuple(name for name in job.nodes if name != node)
        if node == job.batch_host:
            raise RequestRefused(
                f"node {node} runs the batch script of job {job.job_id}, and Slurm lets no job give that node away",
                "no rank is left there: it is free once the job ends, and what happens to the script ends the job",
            )
        if not remaining:
            raise RequestRefused(f"node {node} is the last one of job {job.job_id}", f"end the job: scancel {job.job_id}")
        await self._client.set_job_nodes(job.job_id, remaining)
        self._ring()

    async def allocations(self, job_ids: Collection[str]) -> list[Allocation]:
        """What these jobs hold (tmd.daemon.job_feed.AllocationSource). Raises QueryFailed, RequestRefused."""
        words = await allocations.ask(self._client, job_ids)
        return words if self.pool is None else await self.pool.complete(words)

    async def maintenance(self) -> list[Maintenance]:
        """What is announced (tmd.daemon.maintenance_feed.MaintenanceSource). Raises QueryFailed, RequestRefused."""
        announced = [each for each in await self._client.reservations() if each.is_maintenance]
        return [Maintenance(name=each.name, start_s=each.start_s, end_s=each.end_s, nodes=each.nodes) for each in announced]

    async def watch(self) -> AsyncIterator[NodeEvent]:
        """As the protocol says. Raises QueryFailed if the very first question is not answered: nobody is known by name yet."""
        seen: dict[str, SlurmNode] = {}
        silence = ""
        while not self._closed:
            self._bell.clear()
            asked_s = time.monotonic()
            try:
                now = {node.name: node for node in await self._client.nodes()}
            except QueryFailed as error:
                if self._closed:
                    # It was cut off by that: no news of Slurm.
                    return
                if not seen:
                    raise
                if not silence:
                    silence = str(error)
                    log.error("Slurm does not answer, the state of %d nodes is unknown: %s", len(seen), error)
                    for name in seen:
                        yield NodeEvent(node=name, state="unknown", reason=silence)
            else:
                if silence:
                    log.info("Slurm answers again")
                # After a silence everything is news.
                for event in changes({} if silence else seen, now):
                    yield event
                for name in seen.keys() - now.keys():
                    yield NodeEvent(node=name, state="unknown", reason="Slurm knows this node no more")
                seen, silence = now, ""
            await self._pause(time.monotonic() - asked_s)

    # ---------------------------------------------------------------- inside

    async def _pause(self, cost_s: float) -> None:
        """Until the next question is due or somebody rings. However often that is, half of the time goes by unasked."""
        if self._closed:
            return
        pause_s = self._settings.pause_s(cost_s)
        await asyncio.sleep(min(cost_s, pause_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._bell.wait(), max(0.0, pause_s - cost_s))

    def _ring(self) -> None:
        """Makes the watch ask at once."""
        self._bell.set()


def changes(before: Mapping[str, SlurmNode], now: Mapping[str, SlurmNode]) -> Iterator[NodeEvent]:
    """What has changed of what the daemon wants to know of nodes."""
    for name, node in now.items():
        was = before.get(name)
        if was is node:
            continue
        news = (node_view(node).meaning, node_reason(node))
        if was is None or news != (node_view(was).meaning, node_reason(was)):
            yield NodeEvent(node=name, state=news[0], reason=news[1])


def node_view(node: SlurmNode, jobs: tuple[str, ...] = ()) -> NodeView:
    return NodeView(name=node.name, base=node.base, flags=node.flags, address=node.address, reason=node_reason(node), jobs=jobs)


def node_reason(node: SlurmNode) -> str:
    """Somebody's words, or the flags where nobody has given any: a node that waits for its reboot often has none."""
    return node.reason or ("" if LEAVING_FLAGS.isdisjoint(node.flags) else f"Slurm calls it {node.state}")
