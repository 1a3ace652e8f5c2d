"""tmctl health: what the nodes' own checks find wrong with them."""

from __future__ import annotations

from typing import Any

import click

from tmd.cli.output import Listing, age, natural, show
from tmd.cli.shell import Tmctl, command


@click.group()
def health() -> None:
    """Findings of tmd-health, which each node's slurmd (or cron) runs."""


@health.command("show")
@command
def health_show(tmctl: Tmctl) -> None:
    """What is wrong with nodes, by their last reports, and what follows from it.

    \b
    Examples:
      tmctl health show
      tmctl story n3                              what was found on a node, and what came of it
    """
    tmctl.answer(tmctl.get("/v1/findings"), lambda answer: _show(answer["findings"]))


@health.command("token")
@command
def health_token(tmctl: Tmctl) -> None:
    """Print the token with which nodes without munge report. Keep it in a file only root can read.

    \b
    Example:
      (umask 077; tmctl health token > /etc/tmd/health.token)
    """
    tmctl.answer(tmctl.post("/v1/findings/token"), lambda answer: click.echo(answer["token"]))


def _show(findings: list[dict[str, Any]]) -> None:
    rows = []
    for each in sorted(findings, key=lambda each: natural(each["node"])):
        found = each["finding"]
        row = (each["node"], found["check"], found["part"], found["severity"], age(each["since_s"]), age(each["seen_s"]))
        rows.append((*row, each["action"], _stage(each), found["reason"]))
    headers = ("node", "check", "part", "severity", "since", "last seen", "action", "stage", "reason")
    show(Listing(headers, rows, empty="no findings"))


def _stage(each: dict[str, Any]) -> str:
    if each["acted"]:
        return "drained"
    word = "counts" if each["confirmed"] else "not confirmed"
    return f"{word}, comes and goes" if each["flapping"] else word
