"""Local clusters with stand-in agents, and the promise that none of their processes outlives a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodes.stand_ins import FAST, MakeCluster, end_all, shell, up
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import LocalSettings


@pytest.fixture
async def make_cluster(tmp_path: Path) -> AsyncIterator[MakeCluster]:
    """Makes clusters over one state directory: the second is the daemon's next life."""
    async with contextlib.AsyncExitStack() as running:

        async def make(settings: LocalSettings = FAST) -> LocalCluster:
            await running.aclose()
            cluster = LocalCluster(settings, tmp_path, daemon_address="unix:/run/tmd.sock", agent_command=shell)
            await running.enter_async_context(up(cluster))
            return cluster

        yield make
    end_all(tmp_path)


@pytest.fixture
async def cluster(make_cluster: MakeCluster) -> LocalCluster:
    return await make_cluster()
