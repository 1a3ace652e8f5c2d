"""A local cluster on a machine with troubles of its own: a full disk, no descriptors left, children reaped by somebody else."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.nodes.stand_ins import PADDING, MakeCluster, full_disk, job, limited, until
from tmd.nodes import local_processes
from tmd.nodes.base import NotRecorded
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import Book, Life

WAITING = "exec sleep 600"


def life(cluster: LocalCluster, job_id: str) -> Life:
    return cluster.job(job_id).lives[-1]


async def states(cluster: LocalCluster) -> list[str]:
    return [view.state for view in await cluster.nodes()]


async def test_what_cannot_be_written_is_not_done(cluster: LocalCluster) -> None:
    job_id = await cluster.submit(job(2, script=WAITING, env=PADDING))
    await cluster.drain("n3", "fan")
    pids = [life.pid for life in cluster.job(job_id).lives]
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "node n1 is not killed": lambda: cluster.kill("n1"),
        "node n1 is not frozen": lambda: cluster.freeze("n1"),
        "node n1 is not set down": lambda: cluster.set_down("n1"),
        "node n1 is not released": lambda: cluster.release(job_id, "n1"),
        "node n1 is not drained": lambda: cluster.drain("n1", "fan"),
        "node n3 is not resumed": lambda: cluster.resume("n3"),
        "job local-1 is not cancelled": lambda: cluster.cancel(job_id),
        "job not started": lambda: cluster.submit(job(1)),
    }
    with full_disk():
        for not_done, ask in asked.items():
            with pytest.raises(NotRecorded, match=rf"^{not_done}.*cluster\.json cannot be written \(File too large\)"):
                await ask()
        assert await states(cluster) == ["ALLOCATED", "ALLOCATED", "IDLE+DRAIN", "IDLE"]
        assert [known.job_id for known in cluster.jobs()] == [job_id]
    assert [pid for pid in pids if local_processes.start_ticks(pid) is not None] == pids
    await cluster.kill("n1")
    with full_disk(), pytest.raises(NotRecorded, match="node n1 is not booted"):
        await cluster.come_back("n1")
    assert len(cluster.job(job_id).lives) == 2
    assert await cluster.come_back("n1") == job_id


async def test_an_agents_end_is_seen_while_the_disk_is_full_and_written_when_it_is_not(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tmd.nodes")
    await cluster.submit(job(1, script=WAITING, env=PADDING))
    ending, later = await cluster.submit(job(1, script=WAITING)), await cluster.submit(job(1, script=WAITING))
    with full_disk():
        for job_id in (ending, later):
            os.kill(life(cluster, job_id).pid, signal.SIGKILL)
            await until(lambda job_id=job_id: life(cluster, job_id).ended_s is not None, "the end is seen")  # type: ignore[misc]
        assert await states(cluster) == ["ALLOCATED", "IDLE", "IDLE", "IDLE"]
    await until(lambda: "is written again" in caplog.text, "the log says that it works again")
    complaints = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(complaints) == 1
    assert "File too large" in complaints[0]
    assert "free space there" in complaints[0]
    written = Book.load(tmp_path / "local" / "cluster.json").jobs[later].lives[-1]
    assert (written.exit_code, written.ended_s is None) == (-signal.SIGKILL, False)


async def test_an_agent_that_cannot_be_looked_at_does_not_count_as_ended(
    cluster: LocalCluster, make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tmd.nodes")
    job_id = await cluster.submit(job(1, script=WAITING))
    # As the next daemon sees it: not as a child, which the kernel would tell about anyway.
    cluster = await make_cluster()
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with limited(resource.RLIMIT_NOFILE, lowest_free):
        await until(lambda: "cannot be watched" in caplog.text, "the log says so")
        assert life(cluster, job_id).ended_s is None
    await until(lambda: "watched again" in caplog.text, "the log says that it works again")
    assert caplog.text.count("cannot be watched") == 1
    assert life(cluster, job_id).ended_s is None


async def test_an_agent_that_the_kernel_has_reaped_is_ended(cluster: LocalCluster) -> None:
    """1. The daemon was started with SIGCHLD ignored. 2. An agent ends. 3. Nobody can wait for it any more."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job_id = await cluster.submit(job(1, script="exit 3"))
        await until(lambda: life(cluster, job_id).ended_s is not None, "the end is seen")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert life(cluster, job_id).exit_code is None


async def test_an_ended_jobs_environment_is_not_kept(cluster: LocalCluster, tmp_path: Path) -> None:
    job_id = await cluster.submit(job(1, script="exit 0", env={"TOKEN": "secret"}))
    await until(lambda: not cluster.job(job_id).runs(), "ended")
    assert "secret" not in (tmp_path / "local" / "cluster.json").read_text()
