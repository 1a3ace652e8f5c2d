"""No resource manager: nodes are what the agents say, and an operator's drain is the only thing anybody knows of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import web

from tmd.api.context import ApiError
from tmd.core.records import NodeRecord, NodeState
from tmd.core.views import NodeView as JobNode
from tmd.nodes.base import NodeEvent, NodeView, UnknownNode


class ManualNodes:
    """Implements tmd.nodes.base.ResourceManager. Drains outlive the daemon through the core's own node records."""

    def __init__(self, job_nodes: Callable[[], list[JobNode]], known: Iterable[NodeRecord]) -> None:
        self._job_nodes = job_nodes
        self._drained = {node.node: node.reason for node in known if node.state in ("draining", "drained")}
        self._news: asyncio.Queue[NodeEvent | None] = asyncio.Queue()

    async def nodes(self) -> list[NodeView]:
        by_name: dict[str, list[JobNode]] = {}
        for node in self._job_nodes():
            by_name.setdefault(node.record.node, []).append(node)
        return [self._view(name, uses) for name, uses in sorted(by_name.items())]

    async def drain(self, node: str, reason: str) -> None:
        self._check(node)
        if node not in self._drained:
            self._tell(node, "draining", reason)
            self._drained[node] = reason

    async def resume(self, node: str) -> None:
        self._check(node)
        self._drained.pop(node, None)
        self._tell(node, "up", "")

    async def release(self, job_id: str, node: str) -> None:
        """Nobody has lent it, so nobody takes it back."""

    async def watch(self) -> AsyncIterator[NodeEvent]:
        for node, reason in list(self._drained.items()):
            yield NodeEvent(node=node, state="draining", reason=reason)
        while (event := await self._news.get()) is not None:
            yield event

    async def close(self) -> None:
        self._news.put_nowait(None)

    def _tell(self, node: str, state: NodeState, reason: str) -> None:
        self._news.put_nowait(NodeEvent(node=node, state=state, reason=reason))

    def _check(self, node: str) -> None:
        known = sorted({view.record.node for view in self._job_nodes()} | self._drained.keys())
        if node not in known:
            raise UnknownNode(f"no job has a node {node}; known: {', '.join(known) or 'none'}", "tmctl nodes")

    def _view(self, name: str, uses: list[JobNode]) -> NodeView:
        jobs = tuple(use.record.job_id for use in uses if use.record.use in ("training", "standby"))
        return NodeView(
            name=name,
            base="ALLOCATED" if jobs else "IDLE",
            flags=("DRAIN",) if name in self._drained else (),
            labels=uses[0].record.labels,
            reason=self._drained.get(name, ""),
            jobs=jobs,
        )


def routes_of_no_cluster(
    resource_manager: str, instead: str = "start tmd-run on each node, or the daemon with: tmd serve --resource-manager local"
) -> list[web.AbstractRouteDef]:
    """In the place of tmd.nodes.local_routes: what is asked of local nodes is refused in words."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"this daemon has no local nodes (resource_manager = {resource_manager})", instead)

    return [web.route("*", "/v1/local/{rest:.*}", refuse)]
