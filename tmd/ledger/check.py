"""Looks at the whole of a ledger: its file, its schema, every row, what the rows say of one another. Changes nothing, and sees
one moment of a ledger that a daemon goes on writing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Table, select

from tmd.core.records import EventRecord, JobRecord, LedgerSnapshot, MigrationRecord, NodeRecord, RankRecord
from tmd.ledger import schema
from tmd.ledger.engine import damage, parse_url, shown
from tmd.ledger.errors import LedgerDamaged, UnreadableRow, translated
from tmd.ledger.existing import existing, require_newest
from tmd.ledger.rows import from_row, unsealed
from tmd.ledger.soundness import contradictions

_Record = TypeVar("_Record", bound=msgspec.Struct)
_Row = TypeVar("_Row")

#: Rows fetched at once.
_CHUNK = 1000


@dataclasses.dataclass(slots=True)
class Checked:
    """What was looked at, and all that was found wrong: one sentence each."""

    ledger: str
    revision: str = ""
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


async def check(database_url: str) -> Checked:
    """Raises BadDatabaseUrl, NoLedger, UnknownRevision, LedgerUnavailable. Damage is no exception but a problem found."""
    checked = Checked(shown(parse_url(database_url)))
    with _damage_is_a_problem(checked):
        async with existing(database_url) as ledger, ledger.database.readers.connect() as connection:
            await connection.run_sync(_look, checked)
    return checked


@contextlib.contextmanager
def _damage_is_a_problem(checked: Checked) -> Iterator[None]:
    """What is in the block ends there; whoever looks goes on with the next thing."""
    try:
        with translated(checked.ledger):
            yield
    except LedgerDamaged as error:
        checked.problems.append(error.message)


def _look(connection: Connection, checked: Checked) -> None:
    checked.problems += damage(connection)
    checked.revision = require_newest(connection, checked.ledger)
    differences = compare_metadata(MigrationContext.configure(connection), schema.metadata)
    if differences:
        wanted = "; ".join(map(_in_words, differences))
        checked.problems.append(f"the schema is not that of revision {checked.revision}, it needs: {wanted}")
        return
    snapshot = LedgerSnapshot(
        jobs=tuple(_records(connection, JobRecord, checked)),
        ranks=tuple(_records(connection, RankRecord, checked)),
        nodes=tuple(_records(connection, NodeRecord, checked)),
        migrations=tuple(_records(connection, MigrationRecord, checked)),
    )
    checked.problems += contradictions(snapshot)
    _look_at_events(connection, checked)
    _look_at_other_tables(connection, checked, {job.job_id for job in snapshot.jobs})


def _in_words(difference: Any) -> str:
    """One of Alembic's differences: what kind, and the names in it."""
    kind, *parts = difference[0] if isinstance(difference, list) else difference
    names = [getattr(part, "name", part) for part in parts]
    return " ".join([kind.replace("_", " "), *(name for name in names if isinstance(name, str))])


def _look_at_events(connection: Connection, checked: Checked) -> None:
    causes = {event.event_id: event.cause for event in _records(connection, EventRecord, checked)}
    for event_id, cause in causes.items():
        if cause != 0 and not (cause < event_id and cause in causes):
            checked.problems.append(f"event {event_id}: the event {cause} that led to it is not there, or came later")


def _look_at_other_tables(connection: Connection, checked: Checked, job_ids: set[str]) -> None:
    for table in (schema.releases, schema.store, schema.store_replies):
        owners = {row["job_id"] for row in _rows(connection, table, unsealed, checked)}
        checked.problems += [f"{table.name}: rows of job {job}, of which there is no record" for job in sorted(owners - job_ids)]
    values = {row["name"]: row["value"] for row in _rows(connection, schema.meta, unsealed, checked)}
    if not values.get("generation", "").isdigit():
        checked.problems.append(f"meta: how often a daemon has started is {values.get('generation')!r}, which is no number")


def _records(connection: Connection, kind: type[_Record], checked: Checked) -> Iterator[_Record]:
    return _rows(connection, schema.TABLE_OF[kind], lambda _, row: from_row(kind, row), checked)


def _rows(connection: Connection, table: Table, read: Callable[[Table, Any], _Row], checked: Checked) -> Iterator[_Row]:
    """Every row that can be read; each one that cannot is a problem."""
    checked.rows[table.name] = 0
    with _damage_is_a_problem(checked):
        for row in connection.execute(select(table).execution_options(yield_per=_CHUNK)):
            checked.rows[table.name] += 1
            try:
                readable = read(table, row)
            except UnreadableRow as error:
                checked.problems.append(str(error))
                continue
            yield readable
