"""Stand-in agents for local clusters, and what tests do with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from tmd.nodes import local_processes
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import Book, JobRequest, LocalSettings

#: An agent with two ranks, one of them in a session of its own. It prints its environment and ends on SIGTERM.
STAND_IN = """env; sleep 600 & setsid sleep 600 & trap 'trap "" TERM; kill 0; exit 7' TERM; wait"""
FAST = LocalSettings(nodes=4, racks=2, poll_s=0.02, notice_s=0.3, release_grace_s=0.2)
#: A book with this in it does not fit on the full disk.
PADDING = {"PATH": os.environ["PATH"], "PADDING": "x" * 100_000}
FULL_AT_BYTES = 64 << 10

MakeCluster = Callable[..., Awaitable[LocalCluster]]


def shell(request: JobRequest) -> list[str]:
    return ["/bin/sh", "-c", *request.command]


@contextlib.asynccontextmanager
async def up(cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Started and watched; at the end closed. Fails if it broke meanwhile."""
    await cluster.start()
    watching = asyncio.create_task(cluster.run())
    try:
        yield cluster
        assert not watching.done(), watching
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await cluster.close()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


def job(nnodes: int = 2, standby: int = 0, script: str = STAND_IN, **more: object) -> JobRequest:
    return JobRequest(command=(script,), nnodes=nnodes, standby=standby, **more)  # type: ignore[arg-type]


def end_all(state_dir: Path) -> None:
    """Kills whatever a cluster over this directory has started."""
    for known in Book.load(state_dir / "local" / "cluster.json").jobs.values():
        for life in known.lives:
            local_processes.kill_all(life.mark)


@contextlib.contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def full_disk() -> contextlib.AbstractContextManager[None]:
    """To the kernel, files of this process end at 64 KiB: the book does not fit, lines of a log do."""
    return limited(resource.RLIMIT_FSIZE, FULL_AT_BYTES)
