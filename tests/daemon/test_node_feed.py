"""Between the resource manager and the core: silence is not cleanliness, and every node is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.daemon import records
from tests.daemon.rig import until
from tmd.core.instructions import Instruction, Persist, ReleaseNode
from tmd.core.records import NodeState
from tmd.core.views import NodeView as JobNode
from tmd.daemon import node_feed
from tmd.daemon.manual_nodes import ManualNodes
from tmd.daemon.node_feed import NodeFeed, Releases
from tmd.ledger.ledger import Ledger
from tmd.nodes.base import NodeEvent, NodeView, QueryFailed, UnknownNode


class Manager:
    """Says what the test wants, fails when it wants."""

    def __init__(self) -> None:
        self.broken = False
        self.refused = 0
        self.released: list[tuple[str, str]] = []
        self.events: asyncio.Queue[NodeEvent | None] = asyncio.Queue()

    async def nodes(self) -> list[NodeView]:
        return []

    async def drain(self, node: str, reason: str) -> None: ...

    async def resume(self, node: str) -> None: ...

    async def close(self) -> None: ...

    async def watch(self) -> AsyncIterator[NodeEvent]:
        while (event := await self.events.get()) is not None:
            if event.node == "broken":
                raise QueryFailed("slurmctld does not answer")
            yield event

    async def release(self, job_id: str, node: str) -> None:
        if self.broken:
            self.refused += 1
            raise QueryFailed("slurmctld does not answer")
        if node == "gone":
            raise UnknownNode("there is no node gone")
        self.released.append((job_id, node))


class HeardByCore:
    """Stands for the loop and its core: keeps what it is told of nodes."""

    def __init__(self) -> None:
        self.core = self
        self.heard: list[tuple[str, NodeState, str]] = []

    def post(self, event: Callable[[float], list[Instruction]]) -> None:
        event(0.0)

    def node_state(self, now: float, node: str, state: NodeState, reason: str) -> list[Instruction]:
        self.heard.append((node, state, reason))
        return []


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_feed, "RETRY_FIRST_S", 0.01)


async def test_a_manager_that_does_not_answer_makes_its_nodes_unknown_until_it_does() -> None:
    """
    1. Two nodes are known, one of them draining.
    2. A query fails: both are unknown, neither is clean.
    3. The manager answers again: what it says counts.
    """
    manager, told = Manager(), HeardByCore()
    for event in (("n1", "up"), ("n2", "draining"), ("broken", "up"), ("n2", "draining")):
        manager.events.put_nowait(NodeEvent(node=event[0], state=event[1]))
    manager.events.put_nowait(None)
    await asyncio.wait_for(NodeFeed(manager, told).run(), 10)  # type: ignore[arg-type]
    assert [(node, state) for node, state, _ in told.heard] == [
        ("n1", "up"),
        ("n2", "draining"),
        ("n1", "unknown"),
        ("n2", "unknown"),
        ("n2", "draining"),
    ]
    assert told.heard[2][2] == "slurmctld does not answer"


async def test_the_log_tells_what_is_news_of_a_node_and_not_what_is_true_of_thousands(caplog: pytest.LogCaptureFixture) -> None:
    """
    1. Two nodes are up, as all are in the beginning; one is drained.
    2. The manager says nothing for a while, and then that all is as before.
    """
    manager = Manager()
    story: list[tuple[str, NodeState, str]] = [
        ("n1", "up", ""),
        ("n2", "up", ""),
        ("n2", "draining", "bad DIMM"),
        ("n1", "unknown", "no answer"),
        ("n2", "unknown", "no answer"),
        ("n1", "up", ""),
        ("n2", "draining", "bad DIMM"),
        ("n2", "up", ""),
    ]
    for node, state, reason in story:
        manager.events.put_nowait(NodeEvent(node=node, state=state, reason=reason))
    manager.events.put_nowait(None)
    with caplog.at_level("INFO", "tmd.daemon"):
        await asyncio.wait_for(NodeFeed(manager, HeardByCore()).run(), 10)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == ["node is draining: bad DIMM", "node is up"]


async def test_a_node_is_given_back_however_long_it_takes_and_then_forgotten(ledger: Ledger) -> None:
    manager = Manager()
    manager.broken = True
    due = [ReleaseNode("j1", "n1", "replaced"), ReleaseNode("j1", "gone", "replaced")]
    await ledger.write(Persist(), due)
    releases = Releases(manager, ledger, await ledger.pending_releases())
    task = asyncio.create_task(releases.run())
    late = ReleaseNode("j1", "n2", "job over")
    await ledger.write(Persist(), [late])
    releases.add(late)
    await until(lambda: manager.refused >= 2, "it is tried again")
    assert len(await ledger.pending_releases()) == 3
    manager.broken = False
    await until(lambda: len(manager.released) == 2, "both are given back")
    async with asyncio.timeout(10):
        while await ledger.pending_releases():
            await asyncio.sleep(0.01)
    assert sorted(manager.released) == [("j1", "n1"), ("j1", "n2")]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_manager_a_drain_is_known_from_the_core_after_a_restart() -> None:
    node = records.node(state="draining", reason="bad DIMM")
    nodes = ManualNodes(lambda: [JobNode(record=node)], [node])
    watch = nodes.watch()
    assert await anext(watch) == NodeEvent(node="n1", state="draining", reason="bad DIMM")
    (view,) = await nodes.nodes()
    assert (view.state, view.meaning, view.reason) == ("ALLOCATED+DRAIN", "draining", "bad DIMM")
    await nodes.drain("n1", "another reason")
    await nodes.resume("n1")
    assert await anext(watch) == NodeEvent(node="n1", state="up", reason="")
    await nodes.close()
    assert [event async for event in watch] == []
    with pytest.raises(UnknownNode, match="known: n1"):
        await nodes.drain("n9", "x")
