"""A hundred planned moves of one job: a rank that stays through all of them holds no more at the end."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.session.conftest import Lab
from tests.session.harness import Cluster
from tmd.protocol.control import TransportName

#: Allocators and caches fill up first.
SETTLED_AFTER = 20
EVERY = 5
ENDLESS = 10_000_000


class Usage:
    """What one process holds, sampled now and then."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.descriptors: list[int] = []
        self.threads: list[int] = []
        self.resident_bytes: list[int] = []

    def sample(self) -> None:
        status = dict(line.split(":", 1) for line in (self._proc / "status").read_text().splitlines())
        self.threads.append(int(status["Threads"]))
        self.resident_bytes.append(int(status["VmRSS"].split()[0]) << 10)
        self.descriptors.append(len(list((self._proc / "fd").iterdir())))


def growth(samples: list[int]) -> float:
    """Over all samples together, by the slope of the line through them."""
    return statistics.linear_regression(range(len(samples)), samples).slope * len(samples)


def move(cluster: Cluster, rank: int) -> None:
    """One whole move, and its node back as a standby."""
    cluster.run_until(lambda: bool(cluster.ready_standbys()))
    migration_id = cluster.migrate(rank)
    cluster.run_until(lambda: cluster.migration(migration_id).ended_s is not None)
    assert cluster.migration(migration_id).state == "done", cluster.migration(migration_id).reason
    assert cluster.migration(migration_id).stayer_links_reopened == 0
    cluster.run_until(lambda: bool(cluster.released))
    cluster.come_back(cluster.released[0])


@pytest.mark.parametrize(("transport", "moves"), [("delta", 100), ("gloo", 60)])
def test_many_planned_moves_leave_nothing_behind(transport: TransportName, moves: int, lab: Lab) -> None:
    with lab.cluster("batchnorm", nodes=3, standbys=1, steps=ENDLESS, transport=transport) as cluster:
        cluster.run_until(lambda: bool(cluster.ready_standbys()) and cluster.step_of(0) > 0)
        stayer = cluster.member(0)
        usage = Usage(stayer.pid)
        for number in range(moves):
            move(cluster, 1 + number % 2)
            if number >= SETTLED_AFTER and number % EVERY == 0:
                usage.sample()
        assert cluster.member(0) is stayer
        assert cluster.core.job("job").record.epoch == moves
    assert growth(usage.descriptors) < 1, usage.descriptors
    assert growth(usage.threads) < 1, usage.threads
    assert growth(usage.resident_bytes) < 4 << 20, usage.resident_bytes
