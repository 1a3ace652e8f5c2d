"""tmctl migrate, migration and migrations: ask for a replacement, watch it, call it off."""

from __future__ import annotations

import sys
import time
from typing import Any
from urllib.parse import quote

import click

from tmd.cli import views
from tmd.cli.client import ClientError
from tmd.cli.output import NOTHING
from tmd.cli.shell import Tmctl, WholeNumber, command
from tmd.cli.watch import perhaps_starting
from tmd.core.records import PHASES

POLL_S = 0.2
ENDED = ("done", "aborted", "failed")
EXIT_INTERRUPTED = 130


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--node", help="Replace all ranks on this node.")
@click.option("--rank", type=WholeNumber(min=0), help="Replace this rank.")
@click.option("--to", "to_node", metavar="NODE", help="Move to this standby node. Default: tmd chooses.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--wait", is_flag=True, help="Show the phases as they pass, until the migration has ended.")
@command
def migrate(
    tmctl: Tmctl, job_id: str, node: str | None, rank: int | None, to_node: str | None, dry_run: bool, wait: bool
) -> None:
    """Move ranks of a running job to a standby. The other ranks never stop.

    \b
    Examples:
      tmctl migrate local-1 --node n3 --dry-run
      tmctl migrate local-1 --node n3 --to n6 --wait
      tmctl migrate local-1 --rank 2
    """
    if (node is None) == (rank is None):
        raise click.UsageError("say which part of the job moves: either --node N or --rank R")
    request: dict[str, Any] = {"job": job_id, "node": node, "rank": rank, "to_node": to_node, "dry_run": dry_run}
    with perhaps_starting(tmctl, job_id):
        answer = tmctl.post("/v1/migrations", {name: value for name, value in request.items() if value is not None})
    if dry_run:
        tmctl.answer(answer, lambda told: click.echo(told["explanation"]))
    elif wait:
        _follow(tmctl, answer["migration_id"])
    else:
        migration_id = answer["migration_id"]
        tmctl.answer(
            answer, lambda _: click.echo(f"{migration_id} has begun; watch it: tmctl migration show {migration_id} --wait")
        )


@click.group()
def migration() -> None:
    """One migration: show it, wait for it, call it off."""


@migration.command("show")
@click.argument("migration_id", metavar="ID")
@click.option("--wait", is_flag=True, help="Show the phases as they pass, until the migration has ended.")
@command
def migration_show(tmctl: Tmctl, migration_id: str, wait: bool) -> None:
    """Who moves where, the six phases, downtime and lost time.

    \b
    Example:
      tmctl migration show m1 --wait
    """
    if wait:
        _follow(tmctl, migration_id)
    else:
        tmctl.answer(tmctl.get(_address(migration_id)), views.show_migration)


@migration.command("abort")
@click.argument("migration_id", metavar="ID")
@command
def migration_abort(tmctl: Tmctl, migration_id: str) -> None:
    """Call a planned migration off. It counts only if the switchover has not happened; training goes on either way.

    \b
    Example:
      tmctl migration abort m1
    """
    answer = tmctl.post(f"{_address(migration_id)}/abort")
    record = answer["record"]
    tmctl.answer(answer, lambda view: click.echo(f"{migration_id} is {record['state']}: {record['reason'] or view['sentence']}"))


@click.command()
@click.option("--job", "job_id", help="Only those of this job.")
@click.option("--limit", type=WholeNumber(1, 10_000), default=100, show_default=True, help="At most this many.")
@command
def migrations(tmctl: Tmctl, job_id: str | None, limit: int) -> None:
    """Migrations, newest first, with the time each phase took and what they cost.

    \b
    Examples:
      tmctl migrations
      tmctl migrations --job local-1 --limit 5
    """
    job = f"&job={quote(job_id, safe='')}" if job_id else ""
    answer = tmctl.get(f"/v1/migrations?limit={limit}{job}")
    tmctl.answer(answer, lambda found: views.show_migrations(found["migrations"]))


def _address(migration_id: str) -> str:
    return f"/v1/migrations/{quote(migration_id, safe='')}"


def _follow(tmctl: Tmctl, migration_id: str) -> None:
    """Tells on stderr what changes until the migration has ended, then shows it. Exit code 1 if it did not succeed."""
    try:
        view = _until_ended(tmctl, migration_id)
    except KeyboardInterrupt:
        click.echo(
            f"\n{migration_id} goes on without you; watch it: tmctl migration show {migration_id} --wait; "
            f"call it off: tmctl migration abort {migration_id}",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    tmctl.answer(view, views.show_migration)
    record = view["record"]
    if record["state"] != "done":
        remedy = f"see what led to it: tmctl story {migration_id}"
        raise ClientError(f"{migration_id} is {record['state']}: {record['reason'] or 'no reason given'}", remedy, status=409)


def _until_ended(tmctl: Tmctl, migration_id: str) -> dict[str, Any]:
    told: set[str] = set()
    view: dict[str, Any] = tmctl.get(_address(migration_id))
    while True:
        for news, line in _progress(view):
            if news not in told:
                told.add(news)
                click.echo(line, err=True)
        if view["record"]["state"] in ENDED:
            return view
        time.sleep(POLL_S)
        view = tmctl.get_patiently(_address(migration_id), migration_id)


def _progress(view: dict[str, Any]) -> list[tuple[str, str]]:
    """All that can be said now, each with what makes it news: phases that have passed, and where the migration stands."""
    record = view["record"]
    ended = record["state"] in ENDED
    timed = [phase for phase in PHASES if phase in record["phases_s"]]
    passed = timed if ended else timed[:-1]
    lines = [(phase, f"  {phase:<10}  {record['phases_s'][phase] * 1000:8.1f} ms") for phase in passed]
    if not ended:
        places = f"{','.join(record['from_nodes']) or NOTHING} → {','.join(record['to_nodes']) or NOTHING}"
        line = f"{record['migration_id']} {record['state']} ({places}): {view['sentence'] or record['reason']}"
        lines.append((line, line))
    return lines
