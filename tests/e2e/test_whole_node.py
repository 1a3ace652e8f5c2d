"""Nodes of two ranks each: both leave at once, in one flip; then one rank alone is lost. Whatever carries the collectives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e import sockets
from tests.e2e.cluster import Cluster, Job, assert_unharmed, until
from tests.e2e.conftest import GLOO_REFERENCE_STEPS
from tests.e2e.losses_rig import stayers
from tests.transports import MODULE_ON_BOTH
from tmd.core.records import PHASES
from tmd.protocol.control import TransportName

pytestmark = MODULE_ON_BOTH

STEPS = GLOO_REFERENCE_STEPS
#: A step lasts at least this long while standbys start, and while something is done to the job.
WAITING_MS, ACTING_MS = 2000, 100
LOST = 3


@pytest.fixture(scope="module")
def job(cluster: Cluster, reference: Job, transport: TransportName) -> Iterator[Job]:
    """Ranks 0 and 1 on n1, 2 and 3 on n2, two standbys on n3."""
    job = cluster.start_job(nnodes=2, nproc_per_node=2, standby=1, steps=STEPS, pace_ms=WAITING_MS, transport=transport)
    job.wait_ready(2)
    job.set_pace(ACTING_MS)
    yield job
    job.end()


def test_both_ranks_of_a_node_move_in_one_flip(cluster: Cluster, job: Job) -> None:
    before = job.pids()
    staying = {before[2], before[3]}
    kept = sockets.local_sockets(staying)
    assert {pid for pid, *_ in kept} == staying
    cluster.ask("drain", "n1", "--reason", "memory errors")
    record = job.wait_measured(until(job.migrations, "the drain makes a migration")[0]["migration_id"])
    assert len(job.migrations()) == 1
    assert sorted(record["leavers"]) == sorted(record["joiners"]) == ["0", "1"]
    assert (record["from_nodes"], record["to_nodes"]) == (["n1"], ["n3"])
    assert (record["stayer_links_reopened"], record["steps_redone"]) == (0, 0)
    assert all(record["phases_s"][phase] >= 0 for phase in PHASES)
    assert job.kinds(record["migration_id"]).count("flipped") == 1
    after = job.pids()
    assert (after[2], after[3]) == (before[2], before[3])
    assert kept <= sockets.local_sockets(staying)
    until(lambda: cluster.node("n1")["manager_state"] == "IDLE+DRAIN", "n1 is free and stays drained")
    assert job.record()["epoch"] == 1


def test_a_node_of_two_ranks_does_not_fit_on_one_standby(cluster: Cluster, job: Job) -> None:
    """n1 was given back and is drained: no standby is left."""
    assert "2 standbys needed, 0 usable" in cluster.refusal("migrate", job.id, "--node", "n2")


def test_a_rank_that_is_lost_takes_its_place_on_the_node_that_came_back(cluster: Cluster, job: Job) -> None:
    job.set_pace(WAITING_MS)
    cluster.ask("resume", "n1")
    cluster.reboot("n1")
    job.wait_ready(2)
    job.set_pace(ACTING_MS)
    before = job.pids()
    os.kill(before[LOST], signal.SIGKILL)
    until(lambda: [move["state"] for move in job.migrations()] == ["done", "done"], "the loss is recovered")
    assert job.migrations()[1]["kind"] == "unplanned"
    assert stayers(before, job.pids()) == {0, 1, 2}
    assert job.node_of(LOST) == "n1"


def test_the_job_ends_as_if_nothing_had_happened(job: Job, reference: Job) -> None:
    job.set_pace(0)
    job.wait_state("done")
    job.wait_gone()
    assert job.record()["approximations"] == []
    assert_unharmed(job, reference, lines_lost={LOST: 1})
    assert len({step for _, step in job.results()}) == STEPS
