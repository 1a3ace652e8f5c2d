"""A copy of a ledger as it is at one moment, while a daemon goes on writing.

SQLite: one file, made by SQLite's own backup and looked through before it has its name; it is a ledger as it stands. Postgres:
an archive made by pg_dump, for pg_restore. Both are readable by their owner alone: they hold the jobs' keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Literal

from tmd.ledger.engine import LOCK_TIMEOUT_S
from tmd.ledger.errors import BRING_BACK, LedgerDamaged
from tmd.ledger.existing import Existing, existing, require_newest

#: A server that does not answer is given up after this long, a dump that does not end after this.
CONNECT_TIMEOUT_S = 10
DUMP_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class BackedUp:
    ledger: str
    file: str
    size_bytes: int
    kind: Literal["sqlite", "pg_dump"]


class CannotBackUp(RuntimeError):
    """The copy could not be written; the text says why. `remedy` is what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


async def backup(database_url: str, target: Path) -> BackedUp:
    """Raises BadDatabaseUrl, NoLedger, UnknownRevision, LedgerUnavailable, CannotBackUp; then there is no new file."""
    async with existing(database_url) as ledger:
        async with ledger.database.readers.connect() as connection:
            await connection.run_sync(require_newest, ledger.shown_url)
        return await asyncio.to_thread(_write, ledger, target)


def _write(ledger: Existing, target: Path) -> BackedUp:
    on_sqlite = ledger.url.get_backend_name() == "sqlite"
    unfinished = target.with_name(f"{target.name}.unfinished")
    if target.exists():
        raise CannotBackUp(f"{target} is there already", "name a new file; nothing is overwritten")
    try:
        os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        _copy(ledger, unfinished) if on_sqlite else _dump(ledger, unfinished)
        _name_durably(unfinished, target)
        return BackedUp(ledger.shown_url, str(target), target.stat().st_size, "sqlite" if on_sqlite else "pg_dump")
    except (OSError, sqlite3.Error) as error:
        raise CannotBackUp(f"{target} cannot be written: {error}", "name a file in a writable folder with enough room") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _copy(ledger: Existing, unfinished: Path) -> None:
    """In one step, so the copy is of one moment; who writes meanwhile does not wait. Raises LedgerDamaged, sqlite3.Error."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S

    def give_up_late(status: int, remaining: int, total: int) -> None:
        if remaining and time.monotonic() > deadline:
            raise sqlite3.OperationalError("the ledger is locked by another process (`fuser` names it)")

    source_uri = f"{Path(str(ledger.url.database)).absolute().as_uri()}?mode=rw"
    with (
        contextlib.closing(sqlite3.connect(source_uri, uri=True, timeout=LOCK_TIMEOUT_S)) as source,
        contextlib.closing(sqlite3.connect(unfinished)) as copy,
    ):
        source.backup(copy, progress=give_up_late)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
        found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(1)")]
    if found != ["ok"]:
        raise LedgerDamaged(f"ledger {ledger.shown_url} is damaged, no copy was kept: {' '.join(found)}", BRING_BACK)


def _dump(ledger: Existing, unfinished: Path) -> None:
    """Raises CannotBackUp."""
    url = ledger.url
    if shutil.which("pg_dump") is None:
        raise CannotBackUp(
            "a ledger on Postgres is copied by pg_dump, which is not installed here",
            "install the PostgreSQL client of the server's version (Debian: postgresql-client), or run pg_dump where it is",
        )
    asked = {"host": url.host, "port": url.port, **url.query}
    place = [f"--{name}={asked[name]}" for name in ("host", "port") if asked[name]]
    user = [f"--username={url.username}"] if url.username else []
    # A password in the arguments could be read by everybody on the machine.
    environ = {
        **os.environ,
        "PGCONNECT_TIMEOUT": str(CONNECT_TIMEOUT_S),
        **({"PGPASSWORD": url.password} if url.password else {}),
    }
    if mode := asked.get("ssl"):
        environ["PGSSLMODE"] = str(mode)
    command = ["pg_dump", "--no-password", "--format=custom", *place, *user, f"--file={unfinished}", f"--dbname={url.database}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=DUMP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CannotBackUp(f"pg_dump did not end within {DUMP_TIMEOUT_S:g} s", "look at the server; prune the ledger") from None
    if done.returncode != 0:
        raise CannotBackUp(f"pg_dump failed: {' '.join(done.stderr.split())}", "see that this pg_dump fits the server's version")


def _name_durably(unfinished: Path, target: Path) -> None:
    """The file has its name only when it is whole and on the disk."""
    for path, flags in ((unfinished, os.O_RDWR), (target.parent, os.O_RDONLY)):
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            if path == unfinished:
                unfinished.rename(target)
        finally:
            os.close(descriptor)
