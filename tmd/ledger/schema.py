"""The ledger's tables as SQLAlchemy knows them. They are made and changed by the revisions in `migrations/` alone.

A table of records has one column per field of its record in `tmd.core.records`, of the same name: text, numbers, booleans and
bytes as such, everything structured (membership tables, phase timings, labels) as JSON. The last column is the row's checksum
(`tmd.ledger.rows`); a revision that changes a table's columns sets it to NULL in that table, which means "not known".
"""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Index, LargeBinary, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord

metadata = MetaData()

_PLAIN: dict[Any, type[TypeEngine[Any]]] = {
    str: Text,
    int: BigInteger,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
}


def _record_table(name: str, record: type[msgspec.Struct], key: tuple[str, ...], *indexes: str) -> Table:
    columns: list[Any] = []
    for field, hint in typing.get_type_hints(record).items():
        kind, nullable = _column_type(hint)
        columns.append(Column(field, kind, primary_key=field in key, nullable=nullable, autoincrement=False))
    return Table(name, metadata, *columns, _checksum(), *(Index(f"{name}_by_{index}", index) for index in indexes))


def _checksum() -> Column[int]:
    return Column("checksum", BigInteger, nullable=True)


def _column_type(hint: Any) -> tuple[TypeEngine[Any], bool]:
    nullable = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        nullable = True
    if typing.get_origin(hint) is typing.Literal:
        hint = str
    plain = _PLAIN.get(hint)
    return (plain() if plain else JSON(none_as_null=True)), nullable


jobs = _record_table("jobs", JobRecord, ("job_id",), "state")
ranks = _record_table("ranks", RankRecord, ("job_id", "incarnation"), "agent_id")
nodes = _record_table("nodes", NodeRecord, ("job_id", "node"))
migrations = _record_table("migrations", MigrationRecord, ("migration_id",), "job_id")
events = _record_table("events", EventRecord, ("event_id",), "subject", "job_id")
#: Where the records of each kind are.
TABLE_OF: dict[type[msgspec.Struct], Table] = {
    JobRecord: jobs,
    RankRecord: ranks,
    NodeRecord: nodes,
    MigrationRecord: migrations,
    EventRecord: events,
}

#: Single values: "generation" (how often a daemon has started on this ledger) and "paused".
meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False), _checksum())

#: Nodes that a job gave up and that the resource manager has not taken back yet.
releases = Table(
    "releases",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("node", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    _checksum(),
)

#: The rendezvous store of each job.
store = Table(
    "store",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
    _checksum(),
)

#: Answers to the last changes that each incarnation asked of the store, so that a repeated request is done once.
store_replies = Table(
    "store_replies",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("incarnation", Text, primary_key=True),
    Column("request_id", BigInteger, primary_key=True, autoincrement=False),
    Column("reply", LargeBinary, nullable=False),
    _checksum(),
)
