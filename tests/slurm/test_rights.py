"""Which of Slurm's levels may do what the daemon does: docs/slurm.md says so, and this is how it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options
from tests.slurm.users import ALICE, BOB
from tmd.nodes.base import RequestRefused
from tmd.nodes.slurm.client import failure

DRAIN = ("update", "nodename=n3", "state=drain", "reason=x")
RESERVE = ("create", "reservation", "reservationname=spare", "starttime=now", "duration=10", "nodes=n3", "users=root")


@pytest.fixture
def own(make_cluster: Callable[[Options], SlurmCluster]) -> SlurmCluster:
    """A cluster with a job of ALICE's on its three nodes."""
    cluster = make_cluster(Options(nodes=3))
    cluster.run("sacctmgr", "-i", "add", "account", "staff")
    job = cluster.sbatch("srun --no-kill sleep 1000", "-N3", "--no-kill", user=ALICE)
    assert job == "1"
    cluster.wait_for(lambda: all(len(cluster.processes_of(node)) > 1 for node in cluster.states()), "job 1 to run")
    return cluster


def test_an_operator_may_change_and_end_jobs_and_change_reservations_but_no_node(own: SlurmCluster) -> None:
    assert may(own, BOB, "update", "jobid=1", "comment=x") is False
    own.run("sacctmgr", "-i", "add", "user", BOB, "account=staff", "adminlevel=Operator")
    own.wait_for(lambda: may(own, BOB, "update", "jobid=1", "comment=x"), "the new level to be known")
    assert may(own, BOB, *RESERVE, "flags=ignore_jobs")
    assert may(own, BOB, "delete", "reservationname=spare")
    assert may(own, BOB, "update", "jobid=1", "nodelist=n[1-2]"), "a job of another's gives a node away"
    assert not may(own, BOB, *DRAIN)
    own.run("scancel", "1", user=BOB)
    own.wait_state("n1", "IDLE")


def test_an_administrator_may_change_nodes_too(own: SlurmCluster) -> None:
    own.run("sacctmgr", "-i", "add", "user", BOB, "account=staff", "adminlevel=Admin")
    own.wait_for(lambda: may(own, BOB, *DRAIN), "the new level to be known")
    assert own.states()["n3"] == "MIXED+DRAIN"
    assert may(own, BOB, "update", "nodename=n3", "state=resume")


def test_an_ordinary_user_may_make_the_own_job_smaller_and_nothing_else(own: SlurmCluster) -> None:
    assert not may(own, ALICE, *DRAIN)
    assert not may(own, ALICE, *RESERVE)
    assert may(own, ALICE, "update", "jobid=1", "nodelist=n[1-2]")
    own.wait_state("n3", "IDLE")


def may(cluster: SlurmCluster, user: str, *what: str) -> bool:
    """Whether it is done; if not, tmd must understand why not."""
    done = cluster.run("scontrol", *what, user=user, check=False)
    if done.returncode == 0:
        return True
    refused = failure("scontrol", done.stdout + done.stderr)
    assert isinstance(refused, RequestRefused)
    assert "adminlevel=Admin" in refused.remedy
    return False
