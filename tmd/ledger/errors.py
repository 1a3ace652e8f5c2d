"""What can go wrong with the ledger, in the daemon's own words: what happened, and what to do.

SQLite and Postgres say it in codes of their own; `translated` is the only place that knows them.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator

import sqlalchemy.exc


class LedgerUnavailable(RuntimeError):
    """The database did not answer: full, locked, read-only or unreachable. Trying again may help. `remedy` is what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class LedgerDamaged(LedgerUnavailable):
    """The database holds what tmd cannot have written. Only a repair helps, so nothing is done with it until then."""


class LedgerTakenOver(RuntimeError):
    """Another daemon has started on this ledger since. This one must end."""


class UnreadableRow(ValueError):
    """A row is not as it was written; the text names its table and key."""


BRING_BACK = (
    "jobs train on meanwhile; stop the daemon, keep the damaged files, bring a backup or the file system back, and look at it "
    "with `tmctl ledger check` before the daemon starts again"
)
_FREE_SPACE = "free some space where it lies; `tmctl ledger prune` removes what is old"
_LOOK_AT_SERVER = "see that Postgres runs, can be reached from here and accepts connections"
_OWN_IT = "make tmd's user the owner of the database and of its tables"
_SQLITE_REMEDIES = {
    sqlite3.SQLITE_FULL: _FREE_SPACE,
    sqlite3.SQLITE_IOERR: "look at the disk: it may be full or broken",
    sqlite3.SQLITE_BUSY: "another process holds its lock (`fuser` names it): end that process, or wait for it",
    sqlite3.SQLITE_READONLY: "the file and its folder must be writable for the daemon's user",
    sqlite3.SQLITE_CANTOPEN: "the folder must exist and be writable for the daemon's user",
    sqlite3.SQLITE_PERM: "the file and its folder must be writable for the daemon's user",
}
#: By the first two characters of the SQLSTATE.
_POSTGRES_REMEDIES = {
    "08": _LOOK_AT_SERVER,
    "25": "the server takes no writes: it may be a standby, or its database may be set read-only",
    "28": "see that pg_hba.conf and the password let this user in",
    "3D": "make the database: createdb, owned by tmd's user",
    "3F": _OWN_IT,
    "42": _OWN_IT,
    "53": "the server is out of disk, memory or connections: look at its log",
    "57": _LOOK_AT_SERVER,
}
_PERMISSION_DENIED = "42501"
#: Tables or columns that must be there are not; a page or the index that leads to it cannot be read.
_POSTGRES_DAMAGE = ("42P01", "42703", "XX001", "XX002")
#: For these SQLite has no code of their own, or the driver finds them itself.
_SQLITE_DAMAGE = ("no such table", "no such column", "Could not decode to UTF-8")
#: A reason may quote what was read: so much of it is shown.
_REASON_LIMIT = 300


@contextlib.contextmanager
def translated(shown_url: str) -> Iterator[None]:
    """Trouble of the database becomes LedgerUnavailable or LedgerDamaged; a statement of ours that cannot be right stays what
    it is."""
    try:
        yield
    except UnreadableRow as error:
        raise LedgerDamaged(f"ledger {shown_url} is damaged: {error}", BRING_BACK) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LedgerDamaged(f"ledger {shown_url} is damaged: a value is unreadable ({error})", BRING_BACK) from error
    except (sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError, OSError) as error:
        original = getattr(error, "orig", None) or error
        if _is_damage(original):
            raise LedgerDamaged(f"ledger {shown_url} is damaged: {_reason(original)}", BRING_BACK) from error
        if _is_our_fault(error, original):
            raise
        raise LedgerUnavailable(f"ledger {shown_url}: {_reason(original)}", _remedy(original)) from error


def _is_our_fault(error: Exception, original: BaseException) -> bool:
    ours = (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError, sqlalchemy.exc.DataError)
    # Class 22: a value that the database cannot take. The driver for Postgres does not call that a DataError.
    return (isinstance(error, ours) or _state(original).startswith("22")) and _state(original) != _PERMISSION_DENIED


def _is_damage(original: BaseException) -> bool:
    code = getattr(original, "sqlite_errorcode", None)
    if code is None:
        return _state(original) in _POSTGRES_DAMAGE or str(original).startswith(_SQLITE_DAMAGE)
    return (code & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(original).startswith(_SQLITE_DAMAGE)


def _remedy(original: BaseException) -> str:
    code = getattr(original, "sqlite_errorcode", None)
    if code is not None:
        return _SQLITE_REMEDIES.get(code & 0xFF, "")
    if isinstance(original, PermissionError):
        return _SQLITE_REMEDIES[sqlite3.SQLITE_READONLY]
    if isinstance(original, OSError) and original.filename:
        return _SQLITE_REMEDIES[sqlite3.SQLITE_CANTOPEN]
    if isinstance(original, OSError):
        return _LOOK_AT_SERVER
    return _POSTGRES_REMEDIES.get(_state(original)[:2], "")


def _state(original: BaseException) -> str:
    """The SQLSTATE that Postgres gave, empty without one."""
    return getattr(original, "sqlstate", None) or ""


def _reason(original: BaseException) -> str:
    """The database's own words, without the statement."""
    if isinstance(original, TimeoutError):
        return "no answer in time"
    return str(original)[:_REASON_LIMIT] or type(original).__name__
