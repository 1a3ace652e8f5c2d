"""Records to rows and back, by the columns of `tmd.ledger.schema`.

Contract: a row is written with a checksum over its other columns and is refused when it does not match, so bytes that were
overwritten on the disk are never taken for a decision. Text is kept without zero bytes, which Postgres cannot store.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import JSON, Connection, Double, Table, Text, bindparam, insert, select, tuple_, update

from tmd.ledger.errors import UnreadableRow
from tmd.ledger.schema import TABLE_OF

_Record = TypeVar("_Record", bound=msgspec.Struct)

#: Rows looked up in one statement, far below what any database allows as parameters.
_CHUNK = 500


def to_row(record: msgspec.Struct) -> dict[str, Any]:
    return {
        column.name: msgspec.to_builtins(value, str_keys=True) if isinstance(column.type, JSON) else value
        for column in TABLE_OF[type(record)].columns
        if column.name != "checksum"
        for value in (getattr(record, column.name),)
    }


def from_row(kind: type[_Record], row: Any) -> _Record:
    """Raises UnreadableRow if the row is not as it was written, or holds what this version does not know."""
    table = TABLE_OF[kind]
    fields = unsealed(table, row)
    try:
        return msgspec.convert(fields, kind, str_keys=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise UnreadableRow(f"{named(table, fields)} is no {kind.__name__}: {error}") from None


def sealed(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it is written: text without zero bytes, and with its checksum."""
    written = {
        name: value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(table.c[name].type, Text) and value else value
        for name, value in row.items()
    }
    return {**written, "checksum": _checksum(table, written)}


def unsealed(table: Table, row: Any) -> dict[str, Any]:
    """The row's columns without the checksum. Raises UnreadableRow if they do not match it."""
    fields = {str(name): value for name, value in row._mapping.items()}  # the names are a subclass of str
    checksum = fields.pop("checksum", None)
    if checksum is not None and checksum != _checksum(table, fields):
        raise UnreadableRow(f"{named(table, fields)} differs from its checksum")
    return fields


def named(table: Table, fields: Mapping[str, Any]) -> str:
    """The row for people: its table and key."""
    return f"row {' '.join(str(fields[column.name]) for column in table.primary_key.columns)!r} of {table.name}"


def upsert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    """Inserts or replaces by primary key; of two rows with the same key the later counts. Needs the writer's lock."""
    keys = [column.name for column in table.primary_key.columns]
    wanted = {tuple(row[key] for key in keys): row for row in (sealed(table, row) for row in rows)}
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


def _checksum(table: Table, fields: Mapping[str, Any]) -> int:
    """Over the values in the order of the columns; the same for what is written and for what any database gives back."""
    values = [
        float(value) if isinstance(column.type, Double) and value is not None else value
        for column in table.columns
        if column.name != "checksum"
        for value in (fields[column.name],)
    ]
    return zlib.crc32(msgspec.msgpack.encode(values))
