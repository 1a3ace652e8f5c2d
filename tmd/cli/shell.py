"""What every command of tmctl shares: the client, --json, and errors in words instead of tracebacks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tmd.cli.client import Client, ClientError
from tmd.cli.output import show_json

_Command = Callable[..., None]
#: The daemon's exit codes are explained once, in the help of every command.
EXIT_CODES = (
    "Exit codes: 0 done; 1 the daemon refused, or what was waited for failed; 2 wrong usage, or no daemon; 130 stopped waiting."
)
#: A daemon that is started again is back within this time.
PATIENCE_S = 30.0
RETRY_S = 0.2
#: From `tmd serve` until it listens, on a busy machine.
DAEMON_START_S = 15.0


@dataclasses.dataclass
class Tmctl:
    """One call of tmctl."""

    client: Client
    as_json: bool = False

    def get(self, target: str) -> Any:
        """Raises ClientError."""
        return self.client.get(target)

    def get_patiently(self, target: str, what: str) -> Any:
        """As `get`, but a daemon that is being started again is waited for; `what` goes on meanwhile. Raises ClientError."""
        deadline = time.monotonic() + PATIENCE_S
        said = False
        while True:
            try:
                return self.client.get(target)
            except ClientError as error:
                if error.status or time.monotonic() > deadline:
                    raise
            if not said:
                click.echo(f"the daemon is away, {what} goes on meanwhile", err=True)
                said = True
            time.sleep(RETRY_S)

    def post(self, target: str, body: Any = None) -> Any:
        """Raises ClientError."""
        return self.client.post(target, body)

    def post_once_there(self, target: str, body: Any) -> Any:
        """As `post`, but a daemon that does not listen yet is waited for: until it does, nothing has been asked. Raises
        ClientError."""
        deadline = time.monotonic() + DAEMON_START_S
        said = False
        while True:
            try:
                return self.client.post(target, body)
            except ClientError as error:
                if not error.absent or time.monotonic() > deadline:
                    raise
            if not said:
                click.echo(
                    f"no daemon listens at {self.client.place} yet: waiting up to {DAEMON_START_S:.0f} s for one", err=True
                )
                said = True
            time.sleep(RETRY_S)

    def answer(self, value: Any, show: Callable[[Any], None]) -> None:
        """JSON for programs, `show` for people."""
        show_json(value) if self.as_json else show(value)


def command(function: _Command) -> _Command:
    """Adds --json and hands the command a Tmctl; an error becomes one line on stderr and an exit code."""

    def run(tmctl: Tmctl, /, *, as_json: bool, **arguments: Any) -> None:
        tmctl.as_json = as_json
        _require_text(arguments)
        try:
            function(tmctl, **arguments)
        except ClientError as error:
            complain(str(error), error.remedy, as_json=as_json)
            raise click.exceptions.Exit(error.exit_code) from None

    functools.update_wrapper(run, function)
    run.__doc__ = with_exit_codes(function.__doc__ or "")
    return click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")(click.pass_obj(run))


class WholeNumber(click.IntRange):
    """So that a refusal says what is wanted: click calls it "integer range"."""

    name = "whole number"


def _require_text(arguments: dict[str, Any]) -> None:
    """The daemon is spoken to in UTF-8. Raises click.UsageError naming an argument that is not."""
    for name, value in arguments.items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, (str, Path)) and not is_text(str(each)):
                raise click.UsageError(f"{name} {shown_bytes(str(each))} is not UTF-8: tmd takes no other names and words")


def is_text(given: str) -> bool:
    """False for what the shell or the file system gave and what is not UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown_bytes(given: str) -> str:
    """What is no text, in characters that every terminal shows."""
    return repr(os.fsencode(given))[1:]


def with_exit_codes(explanation: str, exit_codes: str = EXIT_CODES) -> str:
    return f"{inspect.cleandoc(explanation)}\n\n{exit_codes}"


def complain(message: str, remedy: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": message, "remedy": remedy}), err=True)
        return
    click.echo(f"error: {message}", err=True)
    if remedy:
        click.echo(f"  what to do: {remedy}", err=True)
