"""A local cluster keeps its promises with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest

from tests.nodes.stand_ins import FAST, MakeCluster, end_all, job, until, up
from tmd.nodes import local_processes
from tmd.nodes.base import NodeEvent, NodeView, RequestRefused, UnknownJob, UnknownNode
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import Life, LocalSettings


async def view(cluster: LocalCluster, node: str) -> NodeView:
    return next(view for view in await cluster.nodes() if view.name == node)


def life(cluster: LocalCluster, job_id: str, node: str) -> Life:
    found = cluster.job(job_id).life_on(node)
    assert found is not None
    return found


async def running(cluster: LocalCluster, job_id: str, node: str) -> list[psutil.Process]:
    """The three processes of a stand-in agent, once all are there."""
    mark = life(cluster, job_id, node).mark
    await until(lambda: len(local_processes.pids_of(mark)) == 3, f"agent and two ranks on {node}")
    return [psutil.Process(pid) for pid in local_processes.pids_of(mark)]


def spawn(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def reap(pid: int) -> None:
    os.waitpid(pid, 0)


def log_of(life: Life) -> list[str]:
    return Path(life.log).read_text().splitlines()


def gone(members: list[psutil.Process]) -> bool:
    return not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


async def test_every_node_has_its_own_address_and_domains(cluster: LocalCluster) -> None:
    seen = {view.name: (view.address, view.labels["rack"], view.state) for view in await cluster.nodes()}
    assert seen == {
        "n1": ("127.0.0.11", "r1", "IDLE"),
        "n2": ("127.0.0.12", "r1", "IDLE"),
        "n3": ("127.0.0.13", "r2", "IDLE"),
        "n4": ("127.0.0.14", "r2", "IDLE"),
    }


async def test_agents_are_told_who_they_are(cluster: LocalCluster, tmp_path: Path) -> None:
    script = "env; pwd"
    environment = {"COLOUR": "blue", "TMD_NODE_INDEX": "9", "TMD_INTERFACE": "eth7"}
    job_id = await cluster.submit(job(1, 1, script, cwd=str(tmp_path), env=environment))
    assert (await view(cluster, "n2")).jobs == (job_id,)
    await until(lambda: not cluster.job(job_id).runs(), "agents ended")
    said = log_of(life(cluster, job_id, "n2"))
    for line in (
        "TMD_DAEMON=unix:/run/tmd.sock",
        f"TMD_JOB_ID={job_id}",
        "TMD_NODE=n2",
        "TMD_NODE_INDEX=1",
        "TMD_HOST=127.0.0.12",
        "TMD_LABELS=rack=r1,zone=z1",
        "COLOUR=blue",
        str(tmp_path),
    ):
        assert line in said
    assert not {"TMD_NODE_INDEX=9", "TMD_INTERFACE=eth7"} & set(said)
    assert life(cluster, job_id, "n2").exit_code == 0
    assert (await view(cluster, "n2")).state == "IDLE"


async def test_a_job_that_does_not_fit_is_refused_with_what_stands_against_it(cluster: LocalCluster) -> None:
    first = await cluster.submit(job(2))
    await cluster.drain("n3", "fan")
    with pytest.raises(RequestRefused, match=rf"2 nodes wanted .*1 free of 4 \(n1 ALLOCATED of {first}; .*n3 IDLE\+DRAIN"):
        await cluster.submit(job(1, 1))
    with pytest.raises(RequestRefused, match="nowhere is not a directory"):
        await cluster.submit(job(1, cwd="/nowhere"))
    with pytest.raises(UnknownJob, match=f"known: {first}"):
        cluster.job("local-9")


async def test_a_command_that_cannot_start_leaves_all_nodes_free(tmp_path: Path) -> None:
    async with up(LocalCluster(FAST, tmp_path, daemon_address="unix:x", agent_command=lambda _: ["/nowhere/tmd-run"])) as cluster:
        with pytest.raises(RequestRefused, match="/nowhere/tmd-run"):
            await cluster.submit(job(2))
        assert cluster.jobs() == []
        assert {view.state for view in await cluster.nodes()} == {"IDLE"}


async def test_a_killed_node_loses_every_process_and_no_other_node_any(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    victims, others = await running(cluster, job_id, "n1"), await running(cluster, job_id, "n2")
    await cluster.kill("n1")
    assert gone(victims)
    assert all(other.is_running() for other in others)
    assert life(cluster, job_id, "n1").exit_code == -signal.SIGKILL


async def test_a_killed_node_is_called_down_only_after_a_while(cluster: LocalCluster) -> None:
    await cluster.submit(job(2))
    began_s = time.time()
    await cluster.kill("n1")
    with pytest.raises(RequestRefused, match="3 nodes wanted"):
        await cluster.submit(job(3))
    deadline_s = began_s + 60
    while (state := (await view(cluster, "n1")).state) == "ALLOCATED":
        assert time.time() < deadline_s
        await asyncio.sleep(0.01)
    assert time.time() - began_s >= FAST.notice_s
    assert state == "DOWN+NOT_RESPONDING"


async def test_a_killed_node_that_nobody_uses_is_down_at_once(cluster: LocalCluster) -> None:
    await cluster.kill("n3")
    assert (await view(cluster, "n3")).meaning == "down"
    assert await cluster.come_back("n3") is None
    assert (await view(cluster, "n3")).state == "IDLE"


async def test_a_node_set_down_is_down_at_once(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1))
    victims = await running(cluster, job_id, "n1")
    await cluster.set_down("n1", "smoke")
    seen = await view(cluster, "n1")
    assert (seen.state, seen.reason, seen.meaning) == ("DOWN", "smoke", "down")
    assert gone(victims)


async def test_a_frozen_node_stands_still_until_it_is_thawed(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1))
    members = await running(cluster, job_id, "n1")
    await cluster.freeze("n1")
    await until(lambda: {member.status() for member in members} == {psutil.STATUS_STOPPED}, "the kernel has stopped them all")
    with pytest.raises(RequestRefused) as refusal:
        await cluster.freeze("n1")
    assert refusal.value.remedy == "tmctl local thaw n1"
    await cluster.thaw("n1")
    await until(lambda: psutil.STATUS_STOPPED not in {member.status() for member in members}, "all run again")
    assert (await view(cluster, "n1")).meaning == "up"


async def test_a_frozen_node_can_be_killed(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1))
    members = await running(cluster, job_id, "n1")
    await cluster.freeze("n1")
    await cluster.kill("n1")
    assert gone(members)


async def test_a_node_that_comes_back_is_a_new_life_for_the_running_job(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    first = life(cluster, job_id, "n1")
    with pytest.raises(RequestRefused, match="not off"):
        await cluster.come_back("n1")
    await cluster.kill("n1")
    assert await cluster.come_back("n1") == job_id
    second = life(cluster, job_id, "n1")
    await running(cluster, job_id, "n1")
    assert (second.number, second.mark == first.mark, second.log) == (2, False, first.log)
    assert second.pid != first.pid
    assert "TMD_NODE_INDEX" not in psutil.Process(second.pid).environ()
    assert (await view(cluster, "n1")).state == "ALLOCATED"


async def test_a_node_that_its_job_has_given_back_can_be_offered_to_it_again(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    members = await running(cluster, job_id, "n1")
    await running(cluster, job_id, "n2")
    await cluster.release(job_id, "n1")
    await until(lambda: life(cluster, job_id, "n1").ended_s is not None, "n1 free")
    assert gone(members)
    assert (await view(cluster, "n1")).state == "IDLE"
    assert await cluster.come_back("n1") == job_id
    await running(cluster, job_id, "n1")
    assert (await view(cluster, "n1")).state == "ALLOCATED"
    with pytest.raises(RequestRefused, match="not off, it is ALLOCATED"):
        await cluster.come_back("n1")


async def test_a_drained_node_that_was_given_back_needs_a_resume_first(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    await running(cluster, job_id, "n1")
    await cluster.drain("n1", "fan")
    await cluster.release(job_id, "n1")
    await until(lambda: life(cluster, job_id, "n1").ended_s is not None, "n1 free")
    assert (await view(cluster, "n1")).state == "IDLE+DRAIN"
    with pytest.raises(RequestRefused, match="not off") as refusal:
        await cluster.come_back("n1")
    assert refusal.value.remedy == "tmctl resume n1"
    await cluster.resume("n1")
    assert await cluster.come_back("n1") == job_id


async def test_a_node_that_comes_back_after_its_job_is_idle(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1))
    await cluster.kill("n1")
    assert not cluster.job(job_id).runs()
    assert await cluster.come_back("n1") is None
    assert (await view(cluster, "n1")).state == "IDLE"


async def test_a_drained_node_that_comes_back_takes_no_work(cluster: LocalCluster) -> None:
    await cluster.submit(job(2))
    await cluster.kill("n1")
    await cluster.drain("n1", "fan")
    assert await cluster.come_back("n1") is None
    assert (await view(cluster, "n1")).state == "IDLE+DRAIN"


async def test_a_drain_and_its_reason_are_kept_as_they_are(cluster: LocalCluster) -> None:
    await cluster.submit(job(1))
    await cluster.drain("n1", "the admin's own")
    await cluster.drain("n1", "another")
    seen = await view(cluster, "n1")
    assert (seen.state, seen.reason, seen.meaning) == ("ALLOCATED+DRAIN", "the admin's own", "draining")
    await cluster.resume("n1")
    with pytest.raises(RequestRefused, match="not drained"):
        await cluster.resume("n1")
    with pytest.raises(UnknownNode, match="known: n1, n2, n3, n4"):
        await cluster.drain("n9", "fan")


async def test_a_released_node_is_free_once_nothing_of_the_job_is_left(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    members, others = await running(cluster, job_id, "n1"), await running(cluster, job_id, "n2")
    await cluster.drain("n1", "fan")
    await cluster.release(job_id, "n1")
    await cluster.release(job_id, "n1")
    await cluster.release(job_id, "n4")
    assert (await view(cluster, "n1")).state == "COMPLETING+DRAIN"
    await until(lambda: life(cluster, job_id, "n1").ended_s is not None, "n1 free")
    assert gone(members)
    assert (await view(cluster, "n1")).state == "IDLE+DRAIN"
    assert all(other.is_running() for other in others)


async def test_a_job_waits_for_nodes_that_are_being_given_back(cluster: LocalCluster) -> None:
    first = await cluster.submit(job(4))
    for node in ("n1", "n2", "n3", "n4"):
        await cluster.release(first, node)
    second = await cluster.submit(job(4))
    assert {view.jobs for view in await cluster.nodes()} == {(second,)}


async def test_what_an_agent_leaves_behind_is_ended(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1))
    members = await running(cluster, job_id, "n1")
    os.kill(life(cluster, job_id, "n1").pid, signal.SIGKILL)
    await until(lambda: life(cluster, job_id, "n1").ended_s is not None, "n1 free")
    assert gone(members)
    assert (await view(cluster, "n1")).state == "IDLE"


async def test_cancel_lets_agents_end_by_themselves(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2))
    await running(cluster, job_id, "n1")
    await running(cluster, job_id, "n2")
    await cluster.cancel(job_id)
    await until(lambda: not cluster.job(job_id).runs(), "job ended")
    assert [life.exit_code for life in cluster.job(job_id).lives] == [7, 7]


async def test_cancel_kills_who_does_not_listen(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(1, script="trap '' TERM; sleep 600 & sleep 600"))
    await until(lambda: len(local_processes.pids_of(life(cluster, job_id, "n1").mark)) == 3, "agent with its children")
    await cluster.cancel(job_id)
    await until(lambda: not cluster.job(job_id).runs(), "job ended")
    assert life(cluster, job_id, "n1").exit_code == -signal.SIGKILL


async def test_watch_tells_first_everything_and_then_what_changes(cluster: LocalCluster) -> None:
    seen: list[NodeEvent] = []

    async def follow() -> None:
        async for event in cluster.watch():
            seen.append(event)

    watch = asyncio.create_task(follow())
    await until(lambda: len(seen) == 4, "the four nodes")
    assert {event.state for event in seen} == {"up"}
    await cluster.drain("n2", "fan")
    await until(lambda: seen[-1] == NodeEvent(node="n2", state="drained", reason="fan"), "the drain")
    await cluster.kill("n3")
    await until(lambda: seen[-1].node == "n3" and seen[-1].state == "down", "the loss")
    assert len(seen) == 6
    await cluster.close()
    await asyncio.wait_for(watch, 5)


DAEMON = """
import asyncio, sys
from pathlib import Path
from tests.nodes.stand_ins import FAST, job, shell
from tmd.nodes.local import LocalCluster

async def main():
    cluster = LocalCluster(FAST, Path(sys.argv[1]), daemon_address="unix:x", agent_command=shell)
    await cluster.start()
    print(await cluster.submit(job(2)), flush=True)
    await cluster.drain("n4", "fan")
    print("drained", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_agents_outlive_a_killed_daemon_and_the_next_one_finds_them(make_cluster: MakeCluster, tmp_path: Path) -> None:
    daemon = spawn([sys.executable, "-c", DAEMON, str(tmp_path)])
    try:
        assert daemon.stdout is not None
        job_id = (await asyncio.to_thread(daemon.stdout.readline)).strip()
        assert (await asyncio.to_thread(daemon.stdout.readline)).strip() == "drained"
    finally:
        daemon.kill()
        daemon.communicate()
    cluster = await make_cluster()
    members = await running(cluster, job_id, "n1")
    assert [view.state for view in await cluster.nodes()] == ["ALLOCATED", "ALLOCATED", "IDLE", "IDLE+DRAIN"]
    await cluster.kill("n1")
    assert gone(members)
    assert life(cluster, job_id, "n1").exit_code is None
    assert await cluster.submit(job(1)) == "local-2"


async def test_an_agent_whose_start_was_not_noted_is_found(make_cluster: MakeCluster) -> None:
    """1. The book says that an agent will start. 2. It starts. 3. The daemon is killed before it can note the pid."""
    cluster = await make_cluster()
    job_id = await cluster.submit(job(1))
    await running(cluster, job_id, "n1")
    started = life(cluster, job_id, "n1")
    pid, started.pid, started.start_ticks = started.pid, 0, 0
    await cluster.drain("n4", "writes the book")
    cluster = await make_cluster()
    assert life(cluster, job_id, "n1").pid == pid
    assert (await view(cluster, "n1")).state == "ALLOCATED"


async def test_a_reused_pid_is_not_taken_for_an_agent(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    job_id = await cluster.submit(job(1, script="exit 3"))
    ended = life(cluster, job_id, "n1")
    await cluster.close()
    bystander = spawn(["sleep", "600"])
    try:
        await until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, "agent gone")
        reap(ended.pid)
        ended.pid, ended.start_ticks = bystander.pid, ended.start_ticks - 1
        await cluster.drain("n4", "writes the book")
        cluster = await make_cluster()
        assert (await view(cluster, "n1")).state == "IDLE"
        await cluster.kill("n1")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()


async def test_an_unreadable_book_is_named(make_cluster: MakeCluster, tmp_path: Path) -> None:
    await make_cluster()
    book = tmp_path / "local" / "cluster.json"
    book.write_text("{not json")
    with pytest.raises(ValueError, match=r"cluster\.json is not a local cluster's state"):
        await make_cluster()
    book.unlink()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"nodes": 0}, "nodes = 0"),
        ({"nodes": 2, "racks": 3}, "racks = 3"),
        ({"nodes": [{"name": "a", "address": "127.0.0.1"}, {"name": "a", "address": "127.0.0.2"}]}, "name a is given"),
        ({"nodes": [{"name": "a", "address": "10.0.0.1"}]}, "loopback"),
    ],
)
def test_settings_that_make_no_cluster_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        msgspec.convert(settings, LocalSettings).expand()


async def test_a_node_that_forks_all_the_time_is_killed_whole(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = await cluster.submit(job(2, script="while :; do sleep 0.01 & sleep 0.01; done"))
    for _ in range(10):
        await cluster.kill("n1")
        assert local_processes.pids_of(life(cluster, job_id, "n1").mark) == []
        assert await cluster.come_back("n1") == job_id
    end_all(tmp_path)
