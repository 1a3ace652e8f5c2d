"""tmctl job: one job, what its replacements cost, its end, and the token for its agents."""

from __future__ import annotations

from urllib.parse import quote

import click

from tmd.cli import views
from tmd.cli.shell import Tmctl, command
from tmd.cli.watch import perhaps_starting


@click.group()
def job() -> None:
    """One job: show it, add up its costs, cancel it, get the token for its agents."""


@job.command("show")
@click.argument("job_id", metavar="JOB")
@command
def job_show(tmctl: Tmctl, job_id: str) -> None:
    """Ranks, standbys, nodes and migrations of one job.

    \b
    Example:
      tmctl job show local-1
    """
    with perhaps_starting(tmctl, job_id):
        view = tmctl.get(f"/v1/jobs/{quote(job_id, safe='')}")
    tmctl.answer(view, views.show_job)


@job.command("cost")
@click.argument("job_id", metavar="JOB")
@command
def job_cost(tmctl: Tmctl, job_id: str) -> None:
    """What its migrations cost this job: how long nobody trained, how much its steps were slowed, bytes by transport and source.

    \b
    Examples:
      tmctl job cost local-1
      tmctl job cost local-1 --json | jq .total.lost_rank_s
    """
    with perhaps_starting(tmctl, job_id):
        answer = tmctl.get(f"/v1/jobs/{quote(job_id, safe='')}/cost")
    tmctl.answer(answer, views.show_job_cost)


@job.command("cancel")
@click.argument("job_id", metavar="JOB")
@command
def job_cancel(tmctl: Tmctl, job_id: str) -> None:
    """End a job: its agents end their ranks. Nothing of it is saved.

    \b
    Example:
      tmctl job cancel local-1
    """
    with perhaps_starting(tmctl, job_id):
        answer = tmctl.post(f"/v1/jobs/{quote(job_id, safe='')}/cancel")
    state, reason = answer["record"]["state"], answer["record"]["reason"]
    said = f"has ended: {reason}" if state in views.JOB_ENDED else f"is {state} and will end"
    tmctl.answer(answer, lambda _: click.echo(f"job {job_id} {said}"))


@job.command("token")
@click.argument("job_id", metavar="JOB")
@command
def job_token(tmctl: Tmctl, job_id: str) -> None:
    """Print the token by which agents on other machines prove whose job this is. Keep it in a file only its owner can read.

    \b
    Example:
      (umask 077; tmctl job token job7 > token)
      tmd-run --daemon http://head:7070 --token-file token --job-id job7 --nnodes 2 train.py
    """
    answer = tmctl.post(f"/v1/jobs/{quote(job_id, safe='')}/token")
    tmctl.answer(answer, lambda token: click.echo(token["token"]))
