"""Removes what is old from a ledger: jobs that ended long ago, with all that belongs to them, and events that nothing needs.

Contract: a job goes whole or stays whole. Jobs that live, jobs that still owe a node to the resource manager, and every event
that led to one that stays are kept, so each story that can be asked for is complete. The newest event is kept whatever its age:
the daemon counts on from it. A daemon may run: each transaction is short, none counts a generation.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from functools import partial

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select

from tmd.ledger import schema
from tmd.ledger.existing import existing, require_newest
from tmd.ledger.reading import JOB_ENDED

#: What belongs to a job, in the order in which it is removed.
_OF_A_JOB = (schema.ranks, schema.nodes, schema.migrations, schema.store, schema.store_replies, schema.jobs)
#: Events removed in one transaction, so that a daemon which wants to write waits some milliseconds.
_CHUNK = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, or would be."""

    ledger: str
    jobs: tuple[str, ...]
    #: Table -> rows, for every table of which some were removed.
    rows: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    jobs: tuple[str, ...]
    events: tuple[int, ...]
    rows: dict[str, int]


async def prune(database_url: str, *, before_s: float, dry_run: bool) -> Pruned:
    """Removes what ended before `before_s` (Unix time), or only says what that is.

    Raises BadDatabaseUrl, NoLedger, UnknownRevision, LedgerUnavailable.
    """
    async with existing(database_url) as ledger:
        async with ledger.database.readers.connect() as connection:
            plan = await connection.run_sync(_plan, ledger.shown_url, before_s)
        if dry_run:
            return Pruned(ledger.shown_url, plan.jobs, plan.rows)
        rows: collections.Counter[str] = collections.Counter()
        jobs = []
        for job_id in plan.jobs:
            removed = await ledger.database.writer.run(partial(_remove_job, job_id=job_id, before_s=before_s))
            rows += removed
            jobs += [job_id] * removed[schema.jobs.name]
        for start in range(0, len(plan.events), _CHUNK):
            chunk = plan.events[start : start + _CHUNK]
            rows += await ledger.database.writer.run(partial(_remove_events, event_ids=chunk))
        return Pruned(ledger.shown_url, tuple(jobs), dict(rows))


def _plan(connection: Connection, shown_url: str, before_s: float) -> _Plan:
    require_newest(connection, shown_url)
    jobs = tuple(connection.scalars(select(schema.jobs.c.job_id).where(_is_over(before_s)).order_by(schema.jobs.c.job_id)))
    events = _needless_events(connection, set(jobs), before_s)
    rows = {table.name: _count(connection, table, before_s) for table in _OF_A_JOB} | {schema.events.name: len(events)}
    return _Plan(jobs, events, {name: count for name, count in rows.items() if count})


def _is_over(before_s: float) -> ColumnElement[bool]:
    owing = select(schema.releases.c.job_id)
    job = schema.jobs.c
    return job.state.in_(JOB_ENDED) & (job.updated_s < before_s) & job.job_id.not_in(owing)


def _needless_events(connection: Connection, going: set[str], before_s: float) -> tuple[int, ...]:
    """Old events of jobs that go or are gone, without those that led to an event which stays."""
    event = schema.events.c
    staying = set(connection.scalars(select(schema.jobs.c.job_id))) - going
    # The daemon may still name its last word about what is no job's as the cause of a new event.
    last_words = select(func.max(event.event_id)).where(event.job_id == "").group_by(event.subject)
    kept = {*connection.scalars(last_words), connection.scalar(select(func.max(event.event_id)))}
    causes: dict[int, int] = {}
    needed: list[int] = []
    for row in connection.execute(select(event.event_id, event.cause, event.job_id, event.time_s)):
        if row.job_id in staying or row.time_s >= before_s or row.event_id in kept:
            needed.append(row.cause)
        else:
            causes[row.event_id] = row.cause
    while needed:
        cause = causes.pop(needed.pop(), None)
        if cause is not None:
            needed.append(cause)
    return tuple(sorted(causes))


def _count(connection: Connection, table: Table, before_s: float) -> int:
    over = select(schema.jobs.c.job_id).where(_is_over(before_s))
    return connection.scalar(select(func.count()).select_from(table).where(table.c.job_id.in_(over))) or 0


def _remove_job(connection: Connection, *, job_id: str, before_s: float) -> collections.Counter[str]:
    """Rows by table; none if the job is not over any more."""
    job = select(schema.jobs.c.job_id).where(schema.jobs.c.job_id == job_id, _is_over(before_s))
    if connection.scalar(job.with_for_update()) is None:
        return collections.Counter()
    removed = {table.name: connection.execute(delete(table).where(table.c.job_id == job_id)).rowcount for table in _OF_A_JOB}
    return collections.Counter(removed)


def _remove_events(connection: Connection, *, event_ids: Sequence[int]) -> collections.Counter[str]:
    table = schema.events
    return collections.Counter({table.name: connection.execute(delete(table).where(table.c.event_id.in_(event_ids))).rowcount})
