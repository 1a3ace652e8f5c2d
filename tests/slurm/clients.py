"""Which clients the contract is held against: the commands, unless TMD_TEST_SLURM_CLIENT says pyslurm (`make test-pyslurm`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from tests.slurm.cluster import SlurmCluster
from tmd.nodes.slurm.choice import make_client
from tmd.nodes.slurm.client import SlurmClient
from tmd.nodes.slurm.nodes import SlurmNodes
from tmd.nodes.slurm.settings import SlurmSettings

CLIENT = os.environ.get("TMD_TEST_SLURM_CLIENT", "commands")


def daemon_settings(cluster: SlurmCluster) -> dict[str, str]:
    """Environment of a daemon that asks this cluster's Slurm through its commands."""
    return {
        "TMD_SLURM_CLIENT": "commands",
        "TMD_SLURM_CONF": str(cluster.places.slurm_conf),
        "TMD_SLURM_BIN_DIR": cluster.bin_dir,
    }


def settings(cluster: SlurmCluster, **changes: object) -> SlurmSettings:
    base = {"client": CLIENT, "conf": str(cluster.places.slurm_conf), "bin_dir": cluster.bin_dir}
    return SlurmSettings(**(base | changes))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened_client(cluster: SlurmCluster, **changes: object) -> AsyncIterator[SlurmClient]:
    client = await make_client(settings(cluster, **changes))
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def opened_nodes(cluster: SlurmCluster, **changes: object) -> AsyncIterator[SlurmNodes]:
    chosen = settings(cluster, **changes)
    nodes = SlurmNodes(chosen, await make_client(chosen))
    await nodes.start()
    try:
        yield nodes
    finally:
        await nodes.close()
