"""Everything in which SQLite and Postgres differ: URLs, durability, locking. The rest of the ledger knows neither."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tmd.ledger.wal import lost_commits

_Result = TypeVar("_Result")

#: How long a statement may wait for another process's lock on a SQLite ledger.
LOCK_TIMEOUT_S = 5.0
#: How long a connection to Postgres may take.
CONNECT_TIMEOUT_S = 10.0
#: Any number, the same in every tmd: it guards the schema's upgrade on Postgres.
_UPGRADE_LOCK = 0x746D64
#: Of a damaged file so many places are named.
_DAMAGES_NAMED = 5


class BadDatabaseUrl(ValueError):
    """The ledger's URL names no database that tmd can use."""


def parse_url(text_url: str) -> URL:
    """The URL with the asynchronous driver filled in. Raises BadDatabaseUrl."""
    try:
        url = make_url(text_url)
    except (ArgumentError, ValueError):  # the second for a port that is no number
        example = "sqlite:////var/lib/tmd/ledger.db or postgresql://host/tmd"
        raise BadDatabaseUrl(f"database: expected a URL such as {example}, got {without_password(text_url)!r}") from None
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    backend = url.get_backend_name()
    if backend not in drivers:
        raise BadDatabaseUrl(f"database: expected sqlite or postgresql, got {backend!r}")
    if backend == "sqlite" and url.database in (None, "", ":memory:"):
        raise BadDatabaseUrl("database: a ledger in memory would not outlive the daemon; give the path of a file")
    return url.set(drivername=drivers[backend])


def without_password(text_url: str) -> str:
    """For people: what stands between the user's name and the host is hidden, also in a text that is no URL."""
    return re.sub(r"(//[^:@/]*):.*@", r"\1:***@", text_url)


def shown(url: URL) -> str:
    """For people: without the driver, the password hidden."""
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


class Writer(Protocol):
    """Runs transactions that write, one at a time."""

    async def run(self, work: Callable[[Connection], _Result]) -> _Result:
        """What `work` returns, once its transaction is durable. Raises what `work` or the database raises."""
        ...

    async def close(self) -> None: ...


class Database(NamedTuple):
    readers: AsyncEngine
    writer: Writer

    async def close(self) -> None:
        await self.writer.close()
        await self.readers.dispose()


def connect(url: URL) -> Database:
    """Connects when it is first used; makes a SQLite file that is not there. What a writer's transaction has committed
    survives a power cut. Raises BadDatabaseUrl, OSError."""
    if url.get_backend_name() != "sqlite":
        return _connect_network(url)
    _keep_private(str(url.database))
    options: dict[str, Any] = {} if "timeout" in url.query else {"connect_args": {"timeout": LOCK_TIMEOUT_S}}
    readers = create_async_engine(url, **options)
    event.listen(readers.sync_engine, "connect", _prepare_sqlite)
    event.listen(readers.sync_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return Database(readers, _FileWriter(url.set(drivername="sqlite"), options))


def _connect_network(url: URL) -> Database:
    # Whatever the server's own default is: a commit that was acknowledged must be on its disk.
    settings = {"application_name": "tmd", "synchronous_commit": "on"}
    try:
        engine = create_async_engine(
            url, pool_pre_ping=True, connect_args={"timeout": CONNECT_TIMEOUT_S, "server_settings": settings}
        )
    except ModuleNotFoundError as error:
        raise BadDatabaseUrl(
            f"database: a ledger on Postgres needs the Python package {error.name}: pip install 'tmd[head,postgres]'"
        ) from None
    return Database(engine.execution_options(isolation_level="REPEATABLE READ"), _NetworkWriter(engine))


class _NetworkWriter:
    """Postgres: the statements are awaited one by one."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def run(self, work: Callable[[Connection], _Result]) -> _Result:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    async def close(self) -> None:
        await self._engine.dispose()


class _FileWriter:
    """SQLite: a whole transaction in one visit to a thread. Statement by statement takes ten times as long (5 ms), and the
    word to go on after a failure waits for it."""

    def __init__(self, url: URL, options: dict[str, Any]) -> None:
        self._engine = create_engine(url, **options)
        event.listen(self._engine, "connect", _prepare_sqlite)
        # A writer that begins as a reader may be refused in the middle; one that begins as a writer waits for its turn.
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ledger")

    async def run(self, work: Callable[[Connection], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown(wait=False)

    def _transact(self, work: Callable[[Connection], _Result]) -> _Result:
        with self._engine.begin() as connection:
            return work(connection)


def lock_for_upgrade(connection: Connection) -> None:
    """Called first in a transaction that writes: whoever upgrades at the same time waits for its end."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    # On SQLite BEGIN IMMEDIATE has taken the only lock there is.


def damage(connection: Connection) -> list[str]:
    """What the database itself finds wrong with its file, nothing if it is whole. Reads all of it (about 150 MB a second).
    Postgres is not asked: that is for its own tools, pg_amcheck and data checksums."""
    if connection.dialect.name != "sqlite":
        return []
    answer = "\n".join(str(row[0]) for row in connection.exec_driver_sql(f"PRAGMA integrity_check({_DAMAGES_NAMED})"))
    return [] if answer == "ok" else [line for line in answer.splitlines() if not line.startswith("***")]


async def damage_before_opening(url: URL) -> str:
    """What the database would hide once it is opened, empty for none. To be asked before `connect`. Raises OSError."""
    if url.get_backend_name() != "sqlite":
        return ""
    return await asyncio.to_thread(lost_commits, Path(str(url.database)))


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
