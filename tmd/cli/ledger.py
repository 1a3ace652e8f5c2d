"""`tmctl ledger`: looks after the daemon's database, beside a daemon that runs or without one."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from tmd.cli.offline import EXIT_REFUSED, Answer, configured, offline
from tmd.config import Config

DAY_S = 86_400.0


@click.group()
def ledger() -> None:
    """The daemon's database: check it, copy it, remove what is old. A daemon may run meanwhile.

    Run these as the daemon's user or root, on the head node: they use the database of the configuration, not the daemon.
    """


@ledger.command()
@offline
@configured
def check(answer: Answer, config: Config) -> None:
    """Look at the whole ledger and name all that is wrong: damaged pages, a schema that is not this version's, rows that
    cannot be read or were not written by tmd, records that contradict one another. Changes nothing.

    \b
    Examples:
      tmctl ledger check
      tmctl ledger check --database sqlite:////backup/ledger-monday.db
      tmctl ledger check --json
    """
    from tmd.ledger.check import check

    checked = asyncio.run(check(config.database_url))
    answer(dataclasses.asdict(checked), _show_checked)
    if checked.problems:
        raise click.exceptions.Exit(EXIT_REFUSED)


@ledger.command()
@click.argument("file", type=click.Path(path_type=Path))
@offline
@configured
def backup(answer: Answer, file: Path, config: Config) -> None:
    """Copy the ledger, as it is at one moment, to FILE, which must not be there yet.

    From SQLite, FILE is a ledger like the original. From Postgres, it is an archive of pg_dump: give it to pg_restore. Keep it
    as secret as the ledger: it holds the jobs' keys.

    \b
    Examples:
      tmctl ledger backup /backup/ledger-monday.db
      tmctl ledger check --database sqlite:////backup/ledger-monday.db
    """
    from tmd.ledger.backup import backup

    copied = asyncio.run(backup(config.database_url, file))
    answer(dataclasses.asdict(copied), _show_copied)


@ledger.command()
@click.option("--older-than", "days", type=click.FloatRange(min=1), required=True, metavar="DAYS", help="At least 1.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@offline
@configured
def prune(answer: Answer, days: float, dry_run: bool, config: Config) -> None:
    """Remove jobs that ended more than DAYS ago, with their migrations and events. What live jobs need stays, and so does a job
    that still owes a node to the resource manager. SQLite uses the space again; its file does not shrink.

    \b
    Examples:
      tmctl ledger prune --older-than 90 --dry-run
      tmctl ledger prune --older-than 90
    """
    from tmd.ledger.prune import prune

    pruned = asyncio.run(prune(config.database_url, before_s=time.time() - days * DAY_S, dry_run=dry_run))
    answer({**dataclasses.asdict(pruned), "older_than_days": days, "dry_run": dry_run}, _show_pruned)


@ledger.command()
@offline
@configured
def upgrade(answer: Answer, config: Config) -> None:
    """Bring the schema to this version, and make the ledger if there is none. The daemon does so by itself when it starts.

    \b
    Example:
      tmctl ledger upgrade
    """
    from tmd.ledger.errors import LedgerUnavailable
    from tmd.ledger.ledger import upgrade

    if not config.daemon.database:
        try:
            config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make the state directory {config.state_dir}: {error.strerror}"
            raise LedgerUnavailable(message, "choose another with --state-dir") from None
    before, after = asyncio.run(upgrade(config.database_url))
    answer({"before": before, "after": after}, _show_upgraded)


def _show_checked(checked: dict[str, Any]) -> None:
    for problem in checked["problems"]:
        click.echo(f"problem: {problem}")
    rows = ", ".join(f"{count} {table}" for table, count in checked["rows"].items() if count)
    found = f"{len(checked['problems'])} problems found" if checked["problems"] else "ok"
    click.echo(f"{checked['ledger']}, revision {checked['revision'] or 'unknown'}: {found}; rows: {rows or 'none'}")
    if checked["problems"]:
        click.echo("what to do: docs/operators.md, 'A damaged ledger'")


def _show_copied(copied: dict[str, Any]) -> None:
    click.echo(f"{copied['ledger']} copied to {copied['file']}, {copied['size_bytes']} bytes")
    if copied["kind"] == "pg_dump":
        click.echo(f"to bring it back into an empty database: pg_restore --no-owner --dbname=URL {copied['file']}")


def _show_pruned(pruned: dict[str, Any]) -> None:
    verb = "would be removed" if pruned["dry_run"] else "removed"
    if not pruned["rows"]:
        click.echo(f"nothing ended more than {pruned['older_than_days']:g} days ago: nothing {verb}")
        return
    rows = ", ".join(f"{count} {table}" for table, count in pruned["rows"].items())
    click.echo(f"{verb}: {rows}")
    if pruned["jobs"]:
        click.echo(f"jobs: {' '.join(pruned['jobs'])}")


def _show_upgraded(upgraded: dict[str, Any]) -> None:
    before, after = upgraded["before"], upgraded["after"]
    click.echo(f"revision {after}, as before" if before == after else f"revision {before or 'none'} -> {after}")
