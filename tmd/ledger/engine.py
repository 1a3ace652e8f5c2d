"""Everything in which SQLite and Postgres differ: URLs, durability, locking. The rest of the ledger knows neither."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import Connection, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

#: Execution option of a transaction that will write.
WRITES = "tmd_writes"
#: How long a statement may wait for another process's lock on a SQLite ledger.
LOCK_TIMEOUT_S = 5.0
#: Any number, the same in every tmd: it guards the schema's upgrade on Postgres.
_UPGRADE_LOCK = 0x746D64


class BadDatabaseUrl(ValueError):
    """The ledger's URL names no database that tmd can use."""


def parse_url(text_url: str) -> URL:
    """The URL with the asynchronous driver filled in. Raises BadDatabaseUrl."""
    try:
        url = make_url(text_url)
    except ArgumentError:
        raise BadDatabaseUrl(
            f"database: expected a URL such as sqlite:////var/lib/tmd/ledger.db or postgresql://host/tmd, got {text_url!r}"
        ) from None
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    backend = url.get_backend_name()
    if backend not in drivers:
        raise BadDatabaseUrl(f"database: expected sqlite or postgresql, got {backend!r}")
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise BadDatabaseUrl("database: a ledger in memory would not outlive the daemon; give the path of a file")
    return url.set(drivername=drivers[backend])


def connect(url: URL) -> AsyncEngine:
    """An engine whose committed transactions survive a power cut. Connects when it is first used."""
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True)
    _keep_private(str(url.database))
    engine = create_async_engine(url, connect_args={} if "timeout" in url.query else {"timeout": LOCK_TIMEOUT_S})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def lock_for_upgrade(connection: Connection) -> None:
    """Called first in a transaction that writes: whoever upgrades at the same time waits for its end."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    # On SQLite BEGIN IMMEDIATE has taken the only lock there is.


def _keep_private(path: str) -> None:
    """The ledger holds job keys, so nobody else may read it, nor the -wal and -shm files, which take its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.chmod(path, 0o600)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours: the driver's own comes too late to be a snapshot
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer that begins as a reader may be refused in the middle; one that begins as a writer waits for its turn.
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
