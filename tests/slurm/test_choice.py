"""Which way Slurm is asked on this machine, and what is said if it cannot be asked."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

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


def test_where_pyslurm_cannot_be_tested_that_is_a_failure_and_said_loudly() -> None:
    script = Path(__file__).parents[2] / "scripts" / "test-pyslurm"
    env = os.environ | {"TMD_TEST_SLURM_PREFIX": "/nonexistent"}
    done = subprocess.run([script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "HAS NOT RUN: there is no /nonexistent/sbin/slurmctld" in done.stderr
