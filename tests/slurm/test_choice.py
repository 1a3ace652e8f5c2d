"""Which way Slurm is asked on this machine, and what is said if it cannot be asked."""

from __future__ import annotations

import importlib.util

import pytest

from tests.slurm.clients import settings
from tests.slurm.cluster import SlurmCluster
from tmd.nodes.slurm.choice import make_client

#: Run by `make test-pyslurm`, where there is one, too.
HAS_PYSLURM = importlib.util.find_spec("pyslurm") is not None


async def test_what_is_there_is_chosen(cluster: SlurmCluster) -> None:
    client = await make_client(settings(cluster, client="auto"))
    assert client.description.startswith("pyslurm" if HAS_PYSLURM else "Slurm's commands")
    assert len(await client.nodes()) == 4
    await client.close()


async def test_commands_that_are_not_there_are_named(cluster: SlurmCluster) -> None:
    with pytest.raises(ValueError, match=r"Slurm's commands cannot be used: .*/nonexistent/scontrol.*bin_dir in \[slurm\]"):
        await make_client(settings(cluster, client="commands", bin_dir="/nonexistent"))
