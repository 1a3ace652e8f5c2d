"""Records to rows and back, by the columns of `tmd.ledger.schema`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import JSON, Connection, Table, bindparam, insert, select, tuple_, update

_Record = TypeVar("_Record", bound=msgspec.Struct)

#: Rows looked up in one statement, far below what any database allows as parameters.
_CHUNK = 500


def to_row(table: Table, record: msgspec.Struct) -> dict[str, Any]:
    return {
        column.name: msgspec.to_builtins(value, str_keys=True) if isinstance(column.type, JSON) else value
        for column in table.columns
        for value in (getattr(record, column.name),)
    }


def from_row(kind: type[_Record], row: Any) -> _Record:
    """Raises msgspec.ValidationError if the row holds what this version does not know."""
    fields = {str(name): value for name, value in row._mapping.items()}  # the names are a subclass of str
    return msgspec.convert(fields, kind, str_keys=True, builtin_types=(bytes,))


def upsert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    """Inserts or replaces by primary key; of two rows with the same key the later counts. Needs the writer's lock."""
    keys = [column.name for column in table.primary_key.columns]
    wanted = {tuple(row[key] for key in keys): row for row in rows}
    known = _existing(connection, table, list(wanted))
    fresh = [row for key, row in wanted.items() if key not in known]
    if fresh:
        connection.execute(insert(table), fresh)
    changed = [{**row, **{f"key_{key}": row[key] for key in keys}} for key, row in wanted.items() if key in known]
    if changed:
        values: dict[str, Any] = {column.name: bindparam(column.name) for column in table.columns if column.name not in keys}
        same_key = [table.c[key] == bindparam(f"key_{key}") for key in keys]
        connection.execute(update(table).where(*same_key).values(values), changed)


def _existing(connection: Connection, table: Table, wanted: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    columns = list(table.primary_key.columns)
    found: set[tuple[Any, ...]] = set()
    for start in range(0, len(wanted), _CHUNK):
        query = select(*columns).where(tuple_(*columns).in_(wanted[start : start + _CHUNK]))
        found.update(tuple(row) for row in connection.execute(query))
    return found
