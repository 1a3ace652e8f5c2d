"""The border to a resource manager, kept by Slurm's own daemons (tmd.nodes.base.ResourceManager)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.slurm.clients import opened_nodes
from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.users import ALICE
from tmd.core.records import NodeState
from tmd.nodes.base import NodeEvent, QueryFailed, RequestRefused, UnknownNode
from tmd.nodes.slurm.nodes import SlurmNodes

DEADLINE_S = 60.0
STEADY = "srun --no-kill --kill-on-bad-exit=0 --wait=0 sleep 1000"


class Watch:
    """What a watch has told so far, and the last word on each node."""

    def __init__(self, nodes: SlurmNodes) -> None:
        self.events: list[NodeEvent] = []
        self._heard = asyncio.Event()
        self._task = asyncio.create_task(self._listen(nodes))

    @property
    def last(self) -> dict[str, NodeState]:
        return {event.node: event.state for event in self.events}

    async def until(self, node: str, *states: NodeState) -> NodeEvent:
        """The event with which the node came to be in one of these states. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while self.last.get(node) not in states:
                self._heard.clear()
                await self._heard.wait()
        return next(event for event in reversed(self.events) if event.node == node)

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _listen(self, nodes: SlurmNodes) -> None:
        async for event in nodes.watch():
            self.events.append(event)
            self._heard.set()


@pytest.fixture
async def nodes(cluster: SlurmCluster) -> AsyncIterator[SlurmNodes]:
    async with opened_nodes(cluster) as opened:
        yield opened


@contextlib.asynccontextmanager
async def watching(nodes: SlurmNodes) -> AsyncIterator[Watch]:
    watch = Watch(nodes)
    try:
        for name in ("n1", "n2", "n3", "n4"):
            await watch.until(name, "up", "unknown")
        yield watch
    finally:
        await watch.end()


def running(cluster: SlurmCluster, *options: str) -> str:
    """A job that runs on n1, n2 and n3."""
    job = cluster.sbatch(STEADY, "-N3", "-wn[1-3]", "--no-kill", *options, user=ALICE)
    cluster.wait_for(lambda: all(len(cluster.processes_of(node)) > 1 for node in ("n1", "n2", "n3")), f"job {job} to run")
    return job


async def test_nodes_are_shown_with_their_states_addresses_and_jobs(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    job = running(cluster)
    await nodes.drain("n3", "x")
    views = {view.name: view for view in await nodes.nodes()}
    assert list(views) == ["n1", "n2", "n3", "n4"]
    assert {name: (view.state, view.meaning, view.jobs) for name, view in views.items()} == {
        "n1": ("MIXED", "up", (job,)),
        "n2": ("MIXED", "up", (job,)),
        "n3": ("MIXED+DRAIN", "draining", (job,)),
        "n4": ("IDLE", "up", ()),
    }
    assert views["n3"].reason == "x"
    assert views["n2"].address == "127.0.0.12"


async def test_an_operator_s_drain_is_seen_with_its_reason_and_so_is_its_end(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    running(cluster)
    async with watching(nodes) as watch:
        for node, state in (("n2", "draining"), ("n4", "drained")):
            cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=bad DIMM")
            assert await watch.until(node, "draining", "drained") == NodeEvent(node=node, state=state, reason="bad DIMM")
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
            assert await watch.until(node, "up") == NodeEvent(node=node, state="up", reason="")
        assert {event.node for event in watch.events[4:]} == {"n2", "n4"}, "nothing is said of nodes that did not change"


async def test_a_node_that_is_to_fail_or_to_be_down_is_seen(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    async with watching(nodes) as watch:
        cluster.run("scontrol", "update", "nodename=n4", "state=fail", "reason=fan")
        assert (await watch.until("n4", "drained")).reason == "fan"
        cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=dead")
        assert (await watch.until("n4", "down")).reason == "dead"
        await nodes.resume("n4")
        await watch.until("n4", "up")


async def test_tmd_s_own_drain_never_overwrites_another_reason(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    for node, state in (("n1", "drain"), ("n2", "fail"), ("n3", "down")):
        cluster.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=the admin's own")
        await nodes.drain(node, "tmd's")
    await nodes.drain("n4", "tmd's")
    await nodes.drain("n4", "tmd's second thought")
    views = {view.name: (view.state, view.reason) for view in await nodes.nodes()}
    assert views == {
        "n1": ("IDLE+DRAIN", "the admin's own"),
        "n2": ("IDLE+FAIL", "the admin's own"),
        "n3": ("DOWN+DRAIN", "the admin's own"),
        "n4": ("IDLE+DRAIN", "tmd's"),
    }


async def test_a_drain_is_ended_and_nothing_else_is(nodes: SlurmNodes) -> None:
    await nodes.drain("n1", "x")
    await nodes.resume("n1")
    assert {view.name: view.meaning for view in await nodes.nodes()}["n1"] == "up"
    with pytest.raises(RequestRefused, match="n2 is not drained, it is IDLE"):
        await nodes.resume("n2")
    with pytest.raises(UnknownNode):
        await nodes.drain("n9", "x")


async def test_a_drained_node_is_given_back_and_free_within_the_drain(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    job = running(cluster)
    async with watching(nodes) as watch:
        await nodes.drain("n3", "to be replaced")
        await watch.until("n3", "draining")
        await nodes.release(job, "n3")
        await watch.until("n3", "drained")
        await nodes.release(job, "n3")
        await nodes.release(job, "n4")
    views = {view.name: (view.state, view.jobs) for view in await nodes.nodes()}
    assert views["n3"] == ("IDLE+DRAIN", ())
    assert views["n2"] == ("MIXED", (job,))


async def test_what_cannot_be_given_back_is_said_and_is_free_with_the_job(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    job = running(cluster)
    with pytest.raises(RequestRefused, match="n1 runs the batch script of job"):
        await nodes.release(job, "n1")
    await nodes.release(job, "n3")
    await nodes.release(job, "n2")
    cluster.run("scancel", job)
    cluster.settle()
    await nodes.release(job, "n1")
    await nodes.release("4000", "n1")
    with pytest.raises(UnknownNode):
        await nodes.release(job, "n[1-4]")


async def test_a_requeued_job_keeps_what_an_earlier_life_of_it_gave_back(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    """
    1. A job is requeued and gets the same nodes again.
    2. A release that was still due from before takes nothing from it; one of its own life does.
    """
    job = running(cluster, "--requeue")
    cluster.run("scontrol", "requeue", job)
    waits = ("squeue", "-h", "-j", job, "-o", "%T")
    cluster.wait_for(lambda: cluster.run(*waits).stdout == "PENDING\n", "the job to wait again")
    # By itself Slurm starts a requeued job only after two minutes; slurmd drops one that comes within a second of its end.
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now+2")
    cluster.wait_for(lambda: all(len(cluster.processes_of(node)) > 1 for node in ("n1", "n2", "n3")), "the job to run again")
    await nodes.release(job, "n3")
    assert {view.name: view.jobs for view in await nodes.nodes()}["n3"] == (f"{job}.1",)
    await nodes.release(f"{job}.1", "n3")
    assert {view.name: view.jobs for view in await nodes.nodes()}["n3"] == ()


async def test_a_job_without_a_script_keeps_its_last_node(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    said = cluster.run("salloc", "--no-shell", "-N1", "-wn2", user=ALICE).stderr
    job = said.partition("Granted job allocation ")[2].split()[0]
    with pytest.raises(RequestRefused, match="n2 is the last one of job"):
        await nodes.release(job, "n2")


async def test_a_killed_node_is_down_once_slurm_has_noticed_and_back_once_it_is(nodes: SlurmNodes, cluster: SlurmCluster) -> None:
    """Slurm needs half a minute; until then the node is up, and tmd knows better by its agents."""
    running(cluster)
    async with watching(nodes) as watch:
        cluster.kill_node("n3")
        assert "ot responding" in (await watch.until("n3", "down")).reason
        cluster.start_part("n3")
        await watch.until("n3", "up")
        assert [event.state for event in watch.events if event.node == "n3"] == ["up", "down", "up"]


async def test_a_restart_of_slurmctld_is_unknown_and_then_as_it_was(cluster: SlurmCluster) -> None:
    """
    1. n1 is drained, and slurmctld is stopped: every node is unknown, which is told once.
    2. slurmctld starts again: the drain is there as it was, and what was drained meanwhile is seen.
    """
    async with opened_nodes(cluster, query_timeout_s=1.0) as nodes, watching(nodes) as watch:
        await nodes.drain("n1", "before")
        await watch.until("n1", "drained")
        cluster.stop_part(SLURMCTLD)
        for node in ("n1", "n2", "n3", "n4"):
            await watch.until(node, "unknown")
        cluster.start_part(SLURMCTLD)
        assert (await watch.until("n1", "draining", "drained")).reason == "before"
        for node in ("n2", "n3", "n4"):
            await watch.until(node, "up")
        cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=after")
        assert (await watch.until("n4", "drained")).reason == "after"
        unknown = [event.reason for event in watch.events if event.node == "n4" and event.state == "unknown"]
        assert [reason for reason in unknown if reason], "with the reason of the silence"


async def test_a_watch_ends_with_the_client(cluster: SlurmCluster) -> None:
    async with opened_nodes(cluster, poll_max_s=30.0, poll_min_s=30.0) as nodes:
        seen = asyncio.create_task(_all_events(nodes))
        await asyncio.sleep(0)
    events = await asyncio.wait_for(seen, DEADLINE_S)
    assert {event.node for event in events} <= {"n1", "n2", "n3", "n4"}


async def _all_events(nodes: SlurmNodes) -> list[NodeEvent]:
    return [event async for event in nodes.watch()]


async def test_a_hint_makes_tmd_ask_at_once_and_is_not_believed(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Asked only every ten minutes, tmd would see nothing of this before its deadline."""
    path = tmp_path / "hints.sock"
    async with (
        opened_nodes(cluster, poll_min_s=600.0, poll_max_s=600.0, hint_socket=str(path)) as nodes,
        watching(nodes) as watch,
    ):
        cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=hinted")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as plugin:
            plugin.sendto(b'{"node": "n1", "state": "DOWN"}', str(path))
            assert (await watch.until("n2", "drained")).reason == "hinted"
            cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=again")
            for _ in range(5):
                plugin.sendto(b"", str(path))
            assert (await watch.until("n3", "drained")).reason == "again"
        assert watch.last == {"n1": "up", "n2": "drained", "n3": "drained", "n4": "up"}
    assert not path.exists()


async def test_what_tmd_itself_does_is_seen_at_once(cluster: SlurmCluster) -> None:
    async with opened_nodes(cluster, poll_min_s=600.0, poll_max_s=600.0) as nodes, watching(nodes) as watch:
        await nodes.drain("n1", "mine")
        await watch.until("n1", "drained")
        await nodes.resume("n1")
        await watch.until("n1", "up")


async def test_a_first_question_without_an_answer_fails(cluster: SlurmCluster) -> None:
    async with opened_nodes(cluster, query_timeout_s=1.0) as nodes:
        cluster.stop_part(SLURMCTLD, signal.SIGKILL)
        with pytest.raises(QueryFailed):
            await anext(nodes.watch())
