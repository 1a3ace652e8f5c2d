"""The ledger as its one writer sees it.

Contract: `write` returns once everything is durable, or raises and then nothing is certain: write the same again until it
returns (rows are replaced by key, so twice is as good as once). Each start of a daemon is a new generation; a daemon that has
been followed by another one can write nothing any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Mapping

import sqlalchemy.exc
from sqlalchemy import delete, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger import revisions, schema
from tmd.ledger.engine import WRITES, connect, parse_url
from tmd.ledger.reading import LedgerReader
from tmd.ledger.rows import to_row, upsert

#: A transaction that has not ended after this long counts as failed.
WRITE_TIMEOUT_S = 15.0
#: The last writes that latency is judged by.
_LATENCIES_KEPT = 1000


class LedgerUnavailable(RuntimeError):
    """The database did not take a write: full, locked, read-only or unreachable. Trying again may help."""


class LedgerTakenOver(RuntimeError):
    """Another daemon has started on this ledger since. This one must end."""


class Ledger(LedgerReader):
    """See the module's contract."""

    def __init__(self, engine: AsyncEngine, generation: int, shown_url: str) -> None:
        super().__init__(engine)
        self._writer = engine.execution_options(**{WRITES: True})
        self._turn = asyncio.Lock()
        self._latencies_s: collections.deque[float] = collections.deque(maxlen=_LATENCIES_KEPT)
        self.generation = generation
        #: For people: without the password.
        self.shown_url = shown_url
        self.writes = 0

    @classmethod
    async def open(cls, database_url: str) -> Ledger:
        """Upgrades the schema and begins a new generation.

        Raises BadDatabaseUrl, UnknownRevision, or LedgerUnavailable with the reason.
        """
        url = parse_url(database_url)
        shown = url.render_as_string(hide_password=True)
        async with contextlib.AsyncExitStack() as on_failure:
            try:
                engine = connect(url)
                on_failure.push_async_callback(engine.dispose)
                await revisions.upgrade(engine)
                generation = await _next_generation(engine)
            except (sqlalchemy.exc.DBAPIError, OSError) as error:
                raise LedgerUnavailable(f"the ledger {shown} cannot be opened: {_reason(error)}") from error
            on_failure.pop_all()
        return cls(engine, generation, shown)

    async def close(self) -> None:
        async with self._turn:
            await self._engine.dispose()

    async def write(self, persist: Persist, releases: Iterable[ReleaseNode] = ()) -> None:
        """All of it in one transaction, with the releases that are due once it is durable.

        Raises LedgerUnavailable, LedgerTakenOver.
        """
        parts = (
            (schema.jobs, persist.jobs),
            (schema.ranks, persist.ranks),
            (schema.nodes, persist.nodes),
            (schema.migrations, persist.migrations),
            (schema.events, persist.events),
        )
        async with self._transaction() as connection:
            for table, records in parts:
                if records:
                    await upsert(connection, table, [to_row(table, record) for record in records])
            if persist.paused is not None:
                await upsert(connection, schema.meta, [{"name": "paused", "value": str(persist.paused).lower()}])
            due = [{"job_id": release.job_id, "node": release.node, "reason": release.reason} for release in releases]
            if due:
                await upsert(connection, schema.releases, due)

    async def released(self, job_id: str, node: str) -> None:
        """The resource manager has taken the node back."""
        table = schema.releases
        async with self._transaction() as connection:
            await connection.execute(delete(table).where(table.c.job_id == job_id, table.c.node == node))

    async def write_store(
        self,
        values: Mapping[tuple[str, str], bytes | None],
        replies: Mapping[tuple[str, str, int], bytes],
        forgotten: Iterable[tuple[str, str, int]] = (),
    ) -> None:
        """Rendezvous stores: (job, key) -> value, None to delete; the replies to remember by (job, incarnation, request id)."""
        store, remembered = schema.store, schema.store_replies
        async with self._transaction() as connection:
            gone = [key for key, value in values.items() if value is None]
            if gone:
                await connection.execute(delete(store).where(tuple_(store.c.job_id, store.c.key).in_(gone)))
            rows = [{"job_id": job, "key": key, "value": value} for (job, key), value in values.items() if value is not None]
            await upsert(connection, store, rows)
            await upsert(connection, remembered, [_reply_row(key, reply) for key, reply in replies.items()])
            old = list(forgotten)
            if old:
                await connection.execute(delete(remembered).where(tuple_(*remembered.primary_key.columns).in_(old)))

    async def forget_store(self, job_id: str) -> None:
        """The job has ended: nobody will ask again."""
        async with self._transaction() as connection:
            for table in (schema.store, schema.store_replies):
                await connection.execute(delete(table).where(table.c.job_id == job_id))

    @property
    def write_median_s(self) -> float | None:
        """Of the last writes, from the wait for one's turn to durable; None before the first."""
        return statistics.median(self._latencies_s) if self._latencies_s else None

    @property
    def write_max_s(self) -> float | None:
        return max(self._latencies_s, default=None)

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        began = time.monotonic()
        try:
            async with self._turn, asyncio.timeout(WRITE_TIMEOUT_S), self._writer.begin() as connection:
                await self._fence(connection)
                yield connection
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError, sqlalchemy.exc.DataError):
            raise  # not the database's trouble but ours: trying again would not help
        except (sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError, OSError) as error:
            raise LedgerUnavailable(_reason(error)) from error
        self._latencies_s.append(time.monotonic() - began)
        self.writes += 1

    async def _fence(self, connection: AsyncConnection) -> None:
        """Takes the row that every writer takes, so of two daemons the older one loses."""
        mine = schema.meta.c.value == str(self.generation)
        row = update(schema.meta).where(schema.meta.c.name == "generation", mine).values(value=str(self.generation))
        if (await connection.execute(row)).rowcount != 1:
            raise LedgerTakenOver(
                f"another daemon has started on the ledger {self.shown_url} after this one (generation {self.generation}): "
                "this one ends; run one daemon per ledger"
            )


async def _next_generation(engine: AsyncEngine) -> int:
    meta = schema.meta
    async with engine.execution_options(**{WRITES: True}).begin() as connection:
        query = select(meta.c.value).where(meta.c.name == "generation").with_for_update()
        last = await connection.scalar(query)
        if last is None:
            await connection.execute(insert(meta).values(name="generation", value="1"))
            return 1
        generation = int(last) + 1
        await connection.execute(update(meta).where(meta.c.name == "generation").values(value=str(generation)))
        return generation


def _reply_row(key: tuple[str, str, int], reply: bytes) -> dict[str, object]:
    job, incarnation, request_id = key
    return {"job_id": job, "incarnation": incarnation, "request_id": request_id, "reply": reply}


def _reason(error: BaseException) -> str:
    """The database's own words, without the statement."""
    original = getattr(error, "orig", None) or error
    if isinstance(original, TimeoutError):
        return f"no answer within {WRITE_TIMEOUT_S:g} s"
    return str(original) or type(original).__name__
