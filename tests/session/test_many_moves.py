"""A hundred planned moves of one job: whoever stays through all of them holds no more at the end."""

from __future__ import annotations

from tests.session.conftest import Lab
from tests.session.harness import Cluster
from tests.transports import BOTH
from tests.usage import Usage, growth

MOVES = 100
#: Of four ranks these move in turn; the others stay.
MOVED = (1, 2)
STAYERS = (0, 3)
#: Allocators and caches fill up first.
SETTLED_AFTER = 20
EVERY = 5
ENDLESS = 10_000_000


def move(cluster: Cluster, rank: int) -> None:
    """One whole move, and its node back as a standby."""
    cluster.run_until(lambda: bool(cluster.ready_standbys()))
    migration_id = cluster.migrate(rank)
    cluster.run_until(lambda: cluster.migration(migration_id).ended_s is not None)
    assert cluster.migration(migration_id).state == "done", cluster.migration(migration_id).reason
    assert cluster.migration(migration_id).stayer_links_reopened == 0
    cluster.run_until(lambda: bool(cluster.released))
    cluster.come_back(cluster.released[0])


@BOTH
def test_many_planned_moves_leave_nothing_behind(lab: Lab) -> None:
    with lab.cluster("batchnorm", "unhurried", nodes=4, standbys=1, steps=ENDLESS) as cluster:
        cluster.run_until(lambda: bool(cluster.ready_standbys()) and cluster.step_of(0) > 0)
        stayers = {rank: cluster.member(rank) for rank in STAYERS}
        usage = {rank: Usage(stayer.pid) for rank, stayer in stayers.items()}
        for number in range(MOVES):
            move(cluster, MOVED[number % len(MOVED)])
            if number >= SETTLED_AFTER and number % EVERY == 0:
                for each in usage.values():
                    each.sample()
        assert {rank: cluster.member(rank) for rank in STAYERS} == stayers
        assert cluster.core.job("job").record.epoch == MOVES
    for rank, held in usage.items():
        assert growth(held.descriptors) < 1, (rank, held.descriptors)
        assert growth(held.threads) < 1, (rank, held.threads)
        assert growth(held.resident_bytes) < 4 << 20, (rank, held.resident_bytes)
