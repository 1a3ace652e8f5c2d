"""The commands of tmctl that look at the daemon and steer nodes and jobs."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import click

from tmd import __version__
from tmd.cli import views
from tmd.cli.client import Client
from tmd.cli.config import config
from tmd.cli.doctor import doctor
from tmd.cli.health import health
from tmd.cli.job import job
from tmd.cli.ledger import ledger
from tmd.cli.local import local
from tmd.cli.migrate import migrate, migration, migrations
from tmd.cli.remote import BadAddress, client_for
from tmd.cli.shell import Tmctl, WholeNumber, command
from tmd.config import default_socket


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="The daemon's unix socket. Default: TMD_SOCKET, then the system's daemon, then this user's.",
)
@click.option(
    "--daemon",
    metavar="ADDRESS",
    help="The daemon on another machine, http://host:port; munge says who you are. Default: TMD_DAEMON without TMD_SOCKET.",
)
@click.option("--munge-socket", envvar="TMD_MUNGE_SOCKET", default="", help="This machine's munged. Default: libmunge's own.")
@click.version_option(__version__, prog_name="tmctl")
@click.pass_context
def main(context: click.Context, socket: Path | None, daemon: str | None, munge_socket: str) -> None:
    """Look at and steer tmd, which replaces one machine of a running training job.

    \b
    Examples:
      tmctl status                                what the daemon is doing, one sentence for each object
      tmctl jobs                                  all jobs with their standbys
      tmctl drain n3 --reason "fan 2 is slow"     empty a node: its ranks move to a standby
      tmctl migrate local-1 --rank 3 --wait       move one rank and watch it go
      tmctl story m1                              what led to a migration, and how it went
      tmctl job cost local-1                      what its replacements cost it, in all
      tmctl doctor                                whether everything is installed as it should be
      tmctl local run --nodes 4 --standby 2 -- train.py --steps 100
      tmctl --daemon http://head:7070 jobs        from a login node with munge
    """
    if socket is not None and daemon is not None:
        raise click.UsageError("--socket and --daemon name two daemons: give one of them")
    if socket is None and daemon is None and "TMD_SOCKET" not in os.environ:
        daemon = os.environ.get("TMD_DAEMON")
    try:
        client = client_for(daemon, munge_socket) if daemon else Client(socket or default_socket())
    except BadAddress as error:
        raise click.UsageError(str(error)) from None
    context.obj = Tmctl(client)


@main.command()
@command
def status(tmctl: Tmctl) -> None:
    """What the daemon is doing, and one sentence for each job, migration, node and standby that is in use now.

    \b
    Examples:
      tmctl status
      watch -n 1 tmctl status
    """
    tmctl.answer(tmctl.get("/v1/status"), views.show_status)


@main.command()
@command
def jobs(tmctl: Tmctl) -> None:
    """Jobs that run and jobs that ended, newest first.

    \b
    Example:
      tmctl jobs
    """
    tmctl.answer(tmctl.get("/v1/jobs"), lambda answer: views.show_jobs(answer["jobs"]))


@main.command()
@command
def nodes(tmctl: Tmctl) -> None:
    """Nodes: what the resource manager says of them, and what jobs use them for.

    \b
    Example:
      tmctl nodes
    """
    tmctl.answer(tmctl.get("/v1/nodes"), views.show_nodes)


@main.command()
@command
def standby(tmctl: Tmctl) -> None:
    """Standby processes; `ready` ones can take a role at once.

    \b
    Example:
      tmctl standby
    """
    tmctl.answer(tmctl.get("/v1/standbys"), lambda answer: views.show_standbys(answer["standbys"]))


@main.command()
@click.argument("node")
@click.option("--reason", required=True, help="Why, for whoever finds the node drained.")
@command
def drain(tmctl: Tmctl, node: str, reason: str) -> None:
    """Empty a node: ranks on it move to standbys, nothing new starts there. Training goes on.

    \b
    Examples:
      tmctl drain n3 --reason "ECC errors, ticket 4711"
      tmctl migrations                            watch what comes of it
    """
    answer = tmctl.post(f"/v1/nodes/{quote(node, safe='')}/drain", {"reason": reason})
    tmctl.answer(answer, lambda seen: click.echo(f"node {seen['node']} is {seen['state']}; see: tmctl migrations"))


@main.command()
@click.argument("node")
@command
def resume(tmctl: Tmctl, node: str) -> None:
    """End a drain: the node may be used again. A migration that the drain began and that has not flipped is called off.

    \b
    Example:
      tmctl resume n3
    """
    answer = tmctl.post(f"/v1/nodes/{quote(node, safe='')}/resume")
    tmctl.answer(answer, lambda seen: click.echo(f"node {seen['node']} is {seen['state']}"))


@main.command()
@click.argument("subject", metavar="ID")
@click.option("--limit", type=WholeNumber(1, 10_000), default=1000, show_default=True, help="At most this many events.")
@command
def story(tmctl: Tmctl, subject: str, limit: int) -> None:
    """What happened to a job, migration, incarnation or node, and what led to it: causes first, what follows indented.

    \b
    Examples:
      tmctl story m1
      tmctl story local-1 --limit 50
    """
    tmctl.answer(tmctl.get(f"/v1/story/{quote(subject, safe='')}?limit={limit}"), views.show_story)


@main.command()
@command
def pause(tmctl: Tmctl) -> None:
    """Begin nothing planned until `tmctl unpause`: drains and requests queue. Lost ranks are still replaced.

    \b
    Example:
      tmctl pause
    """
    tmctl.answer(tmctl.post("/v1/pause"), lambda _: click.echo("paused: nothing planned begins; undo with: tmctl unpause"))


@main.command()
@command
def unpause(tmctl: Tmctl) -> None:
    """End a pause: what has queued begins.

    \b
    Example:
      tmctl unpause
    """
    tmctl.answer(tmctl.post("/v1/unpause"), lambda _: click.echo("active: planned migrations begin again"))


for each in (job, migrate, migration, migrations, health, doctor, local, ledger, config):
    main.add_command(each)


if __name__ == "__main__":
    main()
