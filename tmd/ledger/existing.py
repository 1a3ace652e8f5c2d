"""A ledger that is there already, for whoever looks after it beside the daemon.

Contract: it is neither made nor upgraded, no generation is counted, the daemon on it goes on. SQLite gives its new files to the
owner of the ledger, so root may look after the ledger of another user.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.engine import URL

from tmd.ledger import revisions
from tmd.ledger.engine import Database, connect, damage_before_opening, parse_url, shown
from tmd.ledger.errors import BRING_BACK, LedgerDamaged, translated


class NoLedger(RuntimeError):
    """There is nothing there, or nothing of this tmd's revision. `remedy` is what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class Existing(NamedTuple):
    url: URL
    #: For people: without the password.
    shown_url: str
    database: Database


async def require_whole(url: URL) -> None:
    """Before anything is opened. Raises LedgerDamaged, OSError."""
    if found := await damage_before_opening(url):
        raise LedgerDamaged(f"ledger {shown(url)} is damaged: {found}", BRING_BACK)


@contextlib.asynccontextmanager
async def existing(database_url: str) -> AsyncIterator[Existing]:
    """Raises BadDatabaseUrl, NoLedger, LedgerUnavailable, LedgerDamaged; trouble of the database within it is one of these."""
    url = parse_url(database_url)
    shown_url = shown(url)
    _require_file(url)
    with translated(shown_url):
        await require_whole(url)
        database = connect(url)
        try:
            yield Existing(url, shown_url, database)
        finally:
            await database.close()


def _require_file(url: URL) -> None:
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise NoLedger(f"there is no ledger at {url.database}", "name the daemon's own --config, --state-dir or --database")


def require_newest(connection: Connection, shown_url: str) -> str:
    """The ledger's revision, which is the one that this tmd needs. Raises NoLedger, UnknownRevision."""
    revision, newest = revisions.current(connection)
    if revision is None:
        raise NoLedger(f"the database {shown_url} holds no ledger", "name the daemon's own --config or --database")
    if revision != newest:
        raise NoLedger(
            f"the ledger {shown_url} is at revision {revision}, this tmd needs {newest}",
            "tmctl ledger upgrade, or use the tmctl of the version that the daemon has",
        )
    return revision
