"""What can go wrong with the ledger, in the daemon's own words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy.exc


class LedgerUnavailable(RuntimeError):
    """The database did not answer: full, locked, read-only or unreachable. Trying again may help."""


class LedgerTakenOver(RuntimeError):
    """Another daemon has started on this ledger since. This one must end."""


@contextlib.contextmanager
def translated(shown_url: str) -> Iterator[None]:
    """Trouble of the database becomes LedgerUnavailable; a statement of ours that cannot be right stays what it is."""
    try:
        yield
    except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError, sqlalchemy.exc.DataError):
        raise
    except (sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError, OSError) as error:
        raise LedgerUnavailable(f"ledger {shown_url}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The database's own words, without the statement."""
    original = getattr(error, "orig", None) or error
    if isinstance(original, TimeoutError):
        return "no answer in time"
    return str(original) or type(original).__name__
