"""What every command of tmctl shares: the client, --json, and errors in words instead of tracebacks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tmd.cli.client import Client, ClientError
from tmd.cli.output import show_json

_Command = Callable[..., None]
_Names = Callable[[Any], list[str]]
#: Where the names of things can be looked up, by what an address begins with.
_LISTS: dict[str, tuple[str, _Names]] = {
    "/v1/migrations/": ("/v1/migrations", lambda answer: [view["record"]["migration_id"] for view in answer["migrations"]]),
    "/v1/migrations": ("/v1/jobs", lambda answer: [view["record"]["job_id"] for view in answer["jobs"]]),
    "/v1/jobs": ("/v1/jobs", lambda answer: [view["record"]["job_id"] for view in answer["jobs"]]),
    "/v1/nodes": ("/v1/nodes", lambda answer: [node["name"] for node in answer["nodes"]]),
}
_NAMES_SHOWN = 12
#: The daemon's exit codes are explained once, in the help of every command.
EXIT_CODES = (
    "Exit codes: 0 done; 1 the daemon refused, or what was waited for failed; 2 wrong usage, or no daemon; 130 stopped waiting."
)


@dataclasses.dataclass
class Tmctl:
    """One call of tmctl."""

    client: Client
    as_json: bool = False

    def get(self, target: str, *, wait_s: float = 0.0) -> Any:
        """Raises ClientError, which names what there is if the one asked for is not."""
        return self._naming(target, lambda: self.client.get(target, wait_s=wait_s))

    def post(self, target: str, body: Any = None) -> Any:
        return self._naming(target, lambda: self.client.post(target, body))

    def answer(self, value: Any, show: Callable[[Any], None]) -> None:
        """JSON for programs, `show` for people."""
        show_json(value) if self.as_json else show(value)

    def _naming(self, target: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except ClientError as error:
            names = self._known(target) if error.status == 404 else None
            if names is None or "known" in str(error):
                raise
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
            raise ClientError(f"{error}; known: {shown or 'none'}", error.remedy, status=error.status) from None

    def _known(self, target: str) -> list[str] | None:
        for start, (address, names) in _LISTS.items():
            if target.startswith(start):
                try:
                    return names(self.client.get(address))
                except ClientError:
                    return None
        return None


def command(function: _Command) -> _Command:
    """Adds --json and hands the command a Tmctl; an error becomes one line on stderr and an exit code."""

    def run(tmctl: Tmctl, /, *, as_json: bool, **arguments: Any) -> None:
        tmctl.as_json = as_json
        try:
            function(tmctl, **arguments)
        except ClientError as error:
            complain(error, as_json=as_json)
            raise click.exceptions.Exit(error.exit_code) from None

    functools.update_wrapper(run, function)
    run.__doc__ = with_exit_codes(function.__doc__ or "")
    return click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")(click.pass_obj(run))


def with_exit_codes(explanation: str) -> str:
    return f"{inspect.cleandoc(explanation)}\n\n{EXIT_CODES}"


def complain(error: ClientError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": str(error), "remedy": error.remedy}), err=True)
        return
    click.echo(f"error: {error}", err=True)
    if error.remedy:
        click.echo(f"  what to do: {error.remedy}", err=True)


def make(socket: Path) -> Tmctl:
    return Tmctl(Client(socket))
