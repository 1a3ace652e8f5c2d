"""What can be asked of the ledger. Readers never wait for the writer (SQLite: WAL; Postgres: MVCC), and what is asked at once is
answered from one moment (Postgres: repeatable read)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tmd.core.records import EventRecord, JobRecord, LedgerSnapshot, MigrationRecord, NodeRecord, RankRecord
from tmd.core.story import story
from tmd.ledger import schema
from tmd.ledger.errors import translated
from tmd.ledger.rows import from_row, unsealed

_Record = TypeVar("_Record", bound=msgspec.Struct)

JOB_ENDED = ("done", "failed")
MIGRATION_ENDED = ("done", "aborted", "failed")
#: How many jobs that have ended a restarted daemon still knows, so that their agents are told how it ended.
ENDED_JOBS_KEPT = 50
READ_TIMEOUT_S = 15.0
#: How long a chain of causes a story follows.
_CAUSES_FOLLOWED = 100


class LedgerReader:
    """Read-only view of one ledger. Every question may raise LedgerUnavailable or LedgerDamaged."""

    def __init__(self, engine: AsyncEngine, shown_url: str) -> None:
        self._engine = engine
        #: For people: without the password.
        self.shown_url = shown_url

    async def load_snapshot(self) -> LedgerSnapshot:
        """Everything a restarted daemon needs, from one moment: the live jobs and the last that ended."""
        async with self._reading() as connection:
            ended = select(schema.jobs.c.job_id).where(schema.jobs.c.state.in_(JOB_ENDED))
            newest_ended = ended.order_by(schema.jobs.c.updated_s.desc()).limit(ENDED_JOBS_KEPT)
            live = schema.jobs.c.state.not_in(JOB_ENDED) | schema.jobs.c.job_id.in_(newest_ended.scalar_subquery())
            jobs = await _records(connection, JobRecord, select(schema.jobs).where(live).order_by(schema.jobs.c.created_s))
            ids = [job.job_id for job in jobs]
            last_event = await connection.scalar(select(func.max(schema.events.c.event_id)))
            values = await connection.execute(select(schema.meta).where(schema.meta.c.name == "paused"))
            paused = [unsealed(schema.meta, row)["value"] for row in values]
            return LedgerSnapshot(
                jobs=tuple(jobs),
                ranks=tuple(await _records(connection, RankRecord, _of_jobs(schema.ranks, ids))),
                nodes=tuple(await _records(connection, NodeRecord, _of_jobs(schema.nodes, ids))),
                migrations=tuple(await _records(connection, MigrationRecord, _of_jobs(schema.migrations, ids))),
                last_event_id=last_event or 0,
                paused=paused == ["true"],
            )

    async def job(self, job_id: str) -> JobRecord | None:
        found = await self._read(JobRecord, select(schema.jobs).where(schema.jobs.c.job_id == job_id))
        return found[0] if found else None

    async def ended_jobs(self, limit: int) -> list[JobRecord]:
        """Newest first."""
        query = select(schema.jobs).where(schema.jobs.c.state.in_(JOB_ENDED))
        return await self._read(JobRecord, query.order_by(schema.jobs.c.updated_s.desc()).limit(limit))

    async def migration(self, migration_id: str) -> MigrationRecord | None:
        query = select(schema.migrations).where(schema.migrations.c.migration_id == migration_id)
        found = await self._read(MigrationRecord, query)
        return found[0] if found else None

    async def migrations(self, *, job_id: str | None = None, limit: int = 100) -> list[MigrationRecord]:
        """Newest first."""
        query = select(schema.migrations)
        if job_id is not None:
            query = query.where(schema.migrations.c.job_id == job_id)
        return await self._read(MigrationRecord, query.order_by(schema.migrations.c.started_s.desc()).limit(limit))

    async def events(self, *, subject: str | None = None, job_id: str | None = None, limit: int = 1000) -> list[EventRecord]:
        """The newest `limit` events about the subject and of the job, oldest first."""
        conditions: list[ColumnElement[bool]] = []
        if subject is not None:
            conditions.append(schema.events.c.subject == subject)
        if job_id is not None:
            conditions.append(schema.events.c.job_id == job_id)
        query = select(schema.events).where(*conditions).order_by(schema.events.c.event_id.desc()).limit(limit)
        return list(reversed(await self._read(EventRecord, query)))

    async def story(self, subject: str, *, limit: int = 1000) -> list[EventRecord]:
        """The events about a migration, incarnation or node and all that led to them; of a job all that happened in it."""
        if await self.job(subject) is not None:
            return await self.events(job_id=subject, limit=limit)
        known = {event.event_id: event for event in await self.events(subject=subject, limit=limit)}
        for _ in range(_CAUSES_FOLLOWED):
            missing = {event.cause for event in known.values()} - known.keys() - {0}
            causes = await self._events_by_id(missing)
            if not causes:
                break
            known |= {event.event_id: event for event in causes}
        return story(known.values(), subject)

    async def pending_releases(self) -> list[tuple[str, str, str]]:
        """(job, node, reason) of nodes that the resource manager has still to take back."""
        async with self._reading() as connection:
            table = schema.releases
            rows = [unsealed(table, row) for row in await connection.execute(select(table))]
            return [(row["job_id"], row["node"], row["reason"]) for row in rows]

    async def store_contents(self, job_id: str) -> tuple[dict[str, bytes], dict[tuple[str, int], bytes]]:
        """The job's rendezvous store: its values, and the remembered replies by (incarnation, request id)."""
        async with self._reading() as connection:
            values = await connection.execute(_of_jobs(schema.store, [job_id]))
            contents = {row["key"]: row["value"] for row in (unsealed(schema.store, row) for row in values)}
            query = _of_jobs(schema.store_replies, [job_id]).order_by(schema.store_replies.c.request_id)
            replies = [unsealed(schema.store_replies, row) for row in await connection.execute(query)]
            return contents, {(row["incarnation"], row["request_id"]): row["reply"] for row in replies}

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with translated(self.shown_url):
            async with asyncio.timeout(READ_TIMEOUT_S), self._engine.begin() as connection:
                yield connection

    async def _events_by_id(self, ids: Iterable[int]) -> list[EventRecord]:
        wanted = list(ids)[:500]
        if not wanted:
            return []
        return await self._read(EventRecord, select(schema.events).where(schema.events.c.event_id.in_(wanted)))

    async def _read(self, kind: type[_Record], query: Select[Any]) -> list[_Record]:
        async with self._reading() as connection:
            return await _records(connection, kind, query)


async def _records(connection: AsyncConnection, kind: type[_Record], query: Select[Any]) -> list[_Record]:
    return [from_row(kind, row) for row in await connection.execute(query)]


def _of_jobs(table: Table, job_ids: list[str]) -> Select[Any]:
    return select(table).where(table.c.job_id.in_(job_ids))
