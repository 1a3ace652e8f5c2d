"""Brings the ledger's schema to what this version of tmd needs. Safe to run by several processes at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

import tmd
from tmd.ledger.engine import lock_for_upgrade


class UnknownRevision(RuntimeError):
    """The ledger was written by a newer tmd than this one."""


def script_location() -> Path:
    """The folder of the revisions: `migrations/` of a checkout, `tmd_migrations` when installed."""
    checkout = Path(tmd.__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "migrations" / "env.py").is_file():
        return checkout / "migrations"
    spec = importlib.util.find_spec("tmd_migrations")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the ledger's schema revisions are missing (package tmd_migrations): install tmd again")
    return Path(next(iter(spec.submodule_search_locations)))


def settings(connection: Connection) -> Config:
    """What Alembic's commands need to work on this connection, within its transaction."""
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def current(connection: Connection) -> tuple[str | None, str]:
    """The ledger's revision (None for an empty database) and the newest that this tmd knows. Raises UnknownRevision."""
    scripts = ScriptDirectory.from_config(settings(connection))
    newest = scripts.get_current_head()
    assert newest is not None, "there is at least one revision"
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise UnknownRevision(
            f"the ledger is at revision {revision}, which this tmd does not know (its newest is {newest}): a newer tmd has "
            "written it; start that version, or name another --database"
        )
    return revision, newest


def upgrade(connection: Connection) -> tuple[str | None, str]:
    """Within a transaction that writes. Returns the revision before (None for an empty database) and after.

    Raises UnknownRevision.
    """
    lock_for_upgrade(connection)
    before, newest = current(connection)
    if before != newest:
        command.upgrade(settings(connection), "head")
    return before, newest
