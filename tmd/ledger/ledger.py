"""The ledger as its one writer sees it.

Contract: `write` returns once everything is durable, or raises and then nothing is certain: write the same again until it
returns (rows are replaced by key, so twice is as good as once). Each start of a daemon is a new generation; a daemon that has
been followed by another one can write nothing any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import Connection, delete, select, tuple_, update

from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger import revisions, schema
from tmd.ledger.engine import Database, connect, damage, parse_url, shown
from tmd.ledger.errors import BRING_BACK, LedgerDamaged, LedgerTakenOver, translated
from tmd.ledger.existing import require_whole
from tmd.ledger.reading import JOB_ENDED, LedgerReader
from tmd.ledger.rows import to_row, unsealed, upsert

_Result = TypeVar("_Result")

#: A transaction that has not ended after this long counts as failed.
WRITE_TIMEOUT_S = 15.0
#: For the first one, which looks at the whole file and may have to change the schema.
OPEN_TIMEOUT_S = 90.0
#: The last writes that latency is judged by.
_LATENCIES_KEPT = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class StoreChange:
    """What one turn of the rendezvous stores changed."""

    #: (job, key) -> value, None to delete it.
    values: Mapping[tuple[str, str], bytes | None]
    #: Replies to remember, by (job, incarnation, request id).
    replies: Mapping[tuple[str, str, int], bytes]
    forgotten: Sequence[tuple[str, str, int]] = ()


class Ledger(LedgerReader):
    """See the module's contract."""

    def __init__(self, database: Database, generation: int, shown_url: str) -> None:
        super().__init__(database.readers, shown_url)
        self._database = database
        self._turn = asyncio.Lock()
        self._closed = False
        self._latencies_s: collections.deque[float] = collections.deque(maxlen=_LATENCIES_KEPT)
        self.generation = generation
        self.writes = 0

    @classmethod
    async def open(cls, database_url: str) -> Ledger:
        """Upgrades the schema and begins a new generation.

        Raises BadDatabaseUrl, UnknownRevision, LedgerDamaged, or LedgerUnavailable with the reason.
        """

        def upgrade_and_count(connection: Connection) -> int:
            revisions.upgrade(connection)
            return _next_generation(connection)

        database, shown_url, generation = await _first_transaction(database_url, upgrade_and_count)
        return cls(database, generation, shown_url)

    async def close(self) -> None:
        """After the write that is under way. Closing twice is as good as once."""
        async with self._turn:
            if not self._closed:
                self._closed = True
                await self._database.close()

    async def write(self, persist: Persist, releases: Iterable[ReleaseNode] = ()) -> None:
        """All of it in one transaction, with the releases that are due once it is durable.

        Raises LedgerUnavailable, LedgerTakenOver.
        """
        kinds = (persist.jobs, persist.ranks, persist.nodes, persist.migrations, persist.events)
        rows = [(schema.TABLE_OF[type(records[0])], [to_row(record) for record in records]) for records in kinds if records]
        if persist.paused is not None:
            rows.append((schema.meta, [{"name": "paused", "value": str(persist.paused).lower()}]))
        due = [{"job_id": release.job_id, "node": release.node, "reason": release.reason} for release in releases]
        rows.append((schema.releases, due))

        def work(connection: Connection) -> None:
            for table, changed in rows:
                upsert(connection, table, changed)

        await self._commit(work)

    async def released(self, job_id: str, node: str) -> None:
        """The resource manager has taken the node back."""
        table = schema.releases
        gone = delete(table).where(table.c.job_id == job_id, table.c.node == node)
        await self._commit(lambda connection: connection.execute(gone))

    async def write_store(self, change: StoreChange) -> None:
        store, remembered = schema.store, schema.store_replies
        gone = [key for key, value in change.values.items() if value is None]
        kept = [{"job_id": job, "key": key, "value": value} for (job, key), value in change.values.items() if value is not None]
        replies = [_reply_row(key, reply) for key, reply in change.replies.items()]

        def work(connection: Connection) -> None:
            upsert(connection, store, kept)
            upsert(connection, remembered, replies)
            if gone:
                connection.execute(delete(store).where(tuple_(store.c.job_id, store.c.key).in_(gone)))
            if change.forgotten:
                key = tuple_(*remembered.primary_key.columns)
                connection.execute(delete(remembered).where(key.in_(change.forgotten)))

        await self._commit(work)

    async def forget_ended_stores(self) -> None:
        """Of jobs that have ended nobody will ask again."""
        ended = select(schema.jobs.c.job_id).where(schema.jobs.c.state.in_(JOB_ENDED))

        def work(connection: Connection) -> None:
            for table in (schema.store, schema.store_replies):
                connection.execute(delete(table).where(table.c.job_id.in_(ended)))

        await self._commit(work)

    @property
    def write_median_s(self) -> float | None:
        """Of the last writes, from the wait for one's turn to durable; None before the first."""
        return statistics.median(self._latencies_s) if self._latencies_s else None

    @property
    def write_max_s(self) -> float | None:
        return max(self._latencies_s, default=None)

    async def _commit(self, work: Callable[[Connection], object]) -> None:
        """Raises LedgerUnavailable, LedgerTakenOver; what is our own fault comes through as it is."""

        def fenced(connection: Connection) -> None:
            self._fence(connection)
            work(connection)

        began = time.monotonic()
        with translated(self.shown_url):
            async with self._turn, asyncio.timeout(WRITE_TIMEOUT_S):
                await self._database.writer.run(fenced)
        self._latencies_s.append(time.monotonic() - began)
        self.writes += 1

    def _fence(self, connection: Connection) -> None:
        """Takes the row that every writer takes, so of two daemons the older one loses."""
        mine = schema.meta.c.value == str(self.generation)
        row = update(schema.meta).where(schema.meta.c.name == "generation", mine).values(value=str(self.generation))
        if connection.execute(row).rowcount != 1:
            raise LedgerTakenOver(
                f"another daemon has started on the ledger {self.shown_url} after this one (generation {self.generation}): "
                "this one ends; run one daemon per ledger"
            )


async def upgrade(database_url: str) -> tuple[str | None, str]:
    """Upgrades the schema alone. Returns the revision before (None: there was no ledger) and after. Raises as Ledger.open."""
    database, _, revisions_seen = await _first_transaction(database_url, revisions.upgrade)
    await database.close()
    return revisions_seen


async def _first_transaction(database_url: str, work: Callable[[Connection], _Result]) -> tuple[Database, str, _Result]:
    url = parse_url(database_url)
    shown_url = shown(url)

    def whole(connection: Connection) -> _Result:
        if found := damage(connection):
            raise LedgerDamaged(f"ledger {shown_url} is damaged: {'; '.join(found)}", BRING_BACK)
        return work(connection)

    async with contextlib.AsyncExitStack() as on_failure:
        with translated(shown_url):
            await require_whole(url)
            database = connect(url)
            on_failure.push_async_callback(database.close)
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                result = await database.writer.run(whole)
        on_failure.pop_all()
    return database, shown_url, result


def _next_generation(connection: Connection) -> int:
    meta = schema.meta
    rows = connection.execute(select(meta).where(meta.c.name == "generation").with_for_update())
    generation = 1 + max((int(unsealed(meta, row)["value"]) for row in rows), default=0)
    upsert(connection, meta, [{"name": "generation", "value": str(generation)}])
    return generation


def _reply_row(key: tuple[str, str, int], reply: bytes) -> dict[str, object]:
    job, incarnation, request_id = key
    return {"job_id": job, "incarnation": incarnation, "request_id": request_id, "reply": reply}
