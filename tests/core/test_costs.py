"""What a job's migrations cost is added up from their records, and what is not known is not taken for nothing."""

from __future__ import annotations

import pytest

from tests.daemon.records import migration
from tmd.core.costs import Cost, job_cost
from tmd.protocol.handoff import HandoffReport, HandoffSource

RANK_1 = HandoffReport(transport="tcp", why="", source="rank 1 on n1", bytes_by_transport={"tcp": 100})
RANK_2 = HandoffReport(
    transport="rdma",
    why="",
    source="rank 0 on n0, rank 3 on n3",
    bytes_by_transport={"rdma": 70, "tcp": 30},
    sources=(
        HandoffSource(rank=0, node="n0", transport="rdma", size_bytes=40),
        HandoffSource(rank=0, node="n0", transport="tcp", size_bytes=30),
        HandoffSource(rank=3, node="n3", transport="rdma", size_bytes=30),
    ),
)


def test_each_migration_and_all_of_them() -> None:
    planned = migration(
        migration_id="m1", started_s=20.0, downtime_s=0.25, lost_time_s=1.0, steps_redone=0, handoffs={1: RANK_1, 2: RANK_2}
    )
    unplanned = migration(
        migration_id="m0", started_s=10.0, kind="unplanned", downtime_s=0.5, lost_time_s=0.5, steps_redone=2, handoffs={1: RANK_1}
    )
    cost = job_cost("j1", 4, [planned, unplanned])
    assert [one.migration_id for one in cost.migrations] == ["m0", "m1"]
    assert cost.migrations[0].cost == Cost(
        pause_s=0.5,
        slowdown_s=0.0,
        lost_time_s=0.5,
        lost_rank_s=2.0,
        steps_redone=2,
        bytes_by_transport={"tcp": 100},
        bytes_by_source={"rank 1 on n1": 100},
    )
    assert cost.migrations[1].cost.bytes_by_transport == {"tcp": 130, "rdma": 70}
    assert cost.total == Cost(
        pause_s=0.75,
        slowdown_s=0.75,
        lost_time_s=1.5,
        lost_rank_s=6.0,
        steps_redone=2,
        bytes_by_transport={"tcp": 230, "rdma": 70},
        bytes_by_source={"rank 1 on n1": 200, "rank 0 on n0": 70, "rank 3 on n3": 30},
    )
    assert cost.unmeasured == 0


@pytest.mark.parametrize("handoffs", [None, {}])
def test_what_is_not_known_is_said_and_not_counted(handoffs: dict[int, HandoffReport] | None) -> None:
    """One that goes on, or was called off: its pause may be known and its lost time not."""
    known = migration(migration_id="m1", downtime_s=0.25, lost_time_s=0.5, steps_redone=0, handoffs={1: RANK_1})
    open_one = migration(migration_id="m2", downtime_s=None, lost_time_s=None, steps_redone=0, handoffs=handoffs)
    cost = job_cost("j1", 2, [known, open_one])
    assert cost.unmeasured == 1
    assert cost.migrations[1].cost == Cost()
    assert (cost.total.lost_time_s, cost.total.lost_rank_s) == (0.5, 1.0)


def test_the_sum_is_of_those_whose_lost_time_is_known() -> None:
    """So that its parts fit together: one that goes on may know its pause, its bytes and its steps already."""
    known = migration(migration_id="m1", downtime_s=0.25, lost_time_s=0.5, steps_redone=1, handoffs={1: RANK_1})
    going_on = migration(migration_id="m2", downtime_s=3.0, lost_time_s=None, steps_redone=1, handoffs={1: RANK_1})
    cost = job_cost("j1", 2, [known, going_on])
    assert cost.migrations[1].cost.pause_s == 3.0
    assert cost.total == cost.migrations[0].cost
    assert cost.unmeasured == 1


def test_a_job_without_migrations_has_no_costs() -> None:
    cost = job_cost("j1", 2, [])
    assert (cost.migrations, cost.total, cost.unmeasured) == ((), Cost(), 0)
