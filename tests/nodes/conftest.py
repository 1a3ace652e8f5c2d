"""Local clusters with stand-in agents, and the promise that none of their processes outlives a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodes.stand_ins import FAST, MakeCluster, end_all, shell
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_state import LocalSettings


@pytest.fixture
async def make_cluster(tmp_path: Path) -> AsyncIterator[MakeCluster]:
    """Makes clusters over one state directory: the second is the daemon's next life."""
    made: list[LocalCluster] = []

    async def make(settings: LocalSettings = FAST) -> LocalCluster:
        for earlier in made:
            await earlier.close()
        cluster = LocalCluster(settings, tmp_path, daemon_address="unix:/run/tmd.sock", agent_command=shell)
        await cluster.start()
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        await cluster.close()
    end_all(tmp_path)


@pytest.fixture
async def cluster(make_cluster: MakeCluster) -> LocalCluster:
    return await make_cluster()
