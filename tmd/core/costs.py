"""What a job's migrations cost it, each and in all, from their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from tmd.core.records import MigrationKind, MigrationRecord, MigrationState


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """None: not known (yet). All moments are told by wall clocks, and noise of the steps may make a difference negative."""

    #: Between the last step committed before and the first one after, less a normal step: nobody trains.
    pause_s: float | None = None
    #: Lost besides the pause, in the steps before and after it: a standby that prepares beside them slows all ranks, its source
    #: among them, since they step together.
    slowdown_s: float | None = None
    #: Both.
    lost_time_s: float | None = None
    #: The time lost by every rank: lost_time_s * world_size.
    lost_rank_s: float | None = None
    steps_redone: int = 0
    #: Bytes of the states' tensors, repeated ones too, by the transport that moved them and by the rank that they came from.
    bytes_by_transport: dict[str, int] = {}
    bytes_by_source: dict[str, int] = {}


class MigrationCost(msgspec.Struct, frozen=True, kw_only=True):
    """One replacement."""

    migration_id: str
    kind: MigrationKind
    state: MigrationState
    started_s: float
    cost: Cost


class JobCost(msgspec.Struct, frozen=True, kw_only=True):
    """All of a job's replacements, oldest first."""

    job_id: str
    world_size: int
    migrations: tuple[MigrationCost, ...]
    #: Of those whose costs are known.
    total: Cost
    #: How many of them are not part of `total`: under way, called off before anything was lost, or ended before it was measured.
    unmeasured: int


def job_cost(job_id: str, world_size: int, migrations: Iterable[MigrationRecord]) -> JobCost:
    ordered = sorted(migrations, key=lambda record: record.started_s)
    each = tuple(_of_migration(record, world_size) for record in ordered)
    measured = [one.cost for one in each if one.cost.lost_time_s is not None]
    return JobCost(
        job_id=job_id,
        world_size=world_size,
        migrations=each,
        total=_total(measured),
        unmeasured=len(each) - len(measured),
    )


def _of_migration(record: MigrationRecord, world_size: int) -> MigrationCost:
    pause_s, lost_s = record.downtime_s, record.lost_time_s
    by_transport: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    for handoff in (record.handoffs or {}).values():
        by_transport.update(handoff.bytes_by_transport)
        for source in handoff.sources:
            by_source[f"rank {source.rank} on {source.node}"] += source.size_bytes
        if not handoff.sources:
            by_source[handoff.source] += sum(handoff.bytes_by_transport.values())
    cost = Cost(
        pause_s=pause_s,
        slowdown_s=lost_s - pause_s if lost_s is not None and pause_s is not None else None,
        lost_time_s=lost_s,
        lost_rank_s=lost_s * world_size if lost_s is not None else None,
        steps_redone=record.steps_redone,
        bytes_by_transport=dict(by_transport),
        bytes_by_source=dict(by_source),
    )
    return MigrationCost(
        migration_id=record.migration_id, kind=record.kind, state=record.state, started_s=record.started_s, cost=cost
    )


def _total(costs: list[Cost]) -> Cost:
    by_transport: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    for cost in costs:
        by_transport.update(cost.bytes_by_transport)
        by_source.update(cost.bytes_by_source)
    return Cost(
        pause_s=_sum(cost.pause_s for cost in costs),
        slowdown_s=_sum(cost.slowdown_s for cost in costs),
        lost_time_s=_sum(cost.lost_time_s for cost in costs),
        lost_rank_s=_sum(cost.lost_rank_s for cost in costs),
        steps_redone=sum(cost.steps_redone for cost in costs),
        bytes_by_transport=dict(by_transport),
        bytes_by_source=dict(by_source),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
