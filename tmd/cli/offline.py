"""Commands that need no daemon: they read the same configuration as the daemon does and work on what it names.

Contract: as with every command of tmctl, --json, errors in words with their remedy, and exit codes that are explained in --help.
The database's packages are imported only when such a command runs: tmctl is called often, and they take longer than it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from tmd.cli.output import show_json
from tmd.cli.shell import complain, with_exit_codes
from tmd.config import Config, ConfigError, default_file, load

Answer = Callable[[Any, Callable[[Any], None]], None]

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_CODES = "Exit codes: 0 done and all is well; 1 refused, or problems found; 2 wrong usage or configuration."

_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS = (
    click.option(
        "--config", "config_file", type=_FILE, help="TOML file. Default: TMD_CONFIG, then /etc/tmd/tmd.toml if it is there."
    ),
    click.option("--state-dir", metavar="DIR", help="Where the daemon keeps its ledger. Default: as configured."),
    click.option("--database", metavar="URL", help="sqlite:////path or postgresql://user@host/db. Default: as configured."),
)


def offline(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --json; the command gets `answer`, which prints. What is expected to go wrong becomes one line on stderr."""

    def run(*, as_json: bool, **arguments: Any) -> None:
        def answer(value: Any, show: Callable[[Any], None]) -> None:
            show_json(value) if as_json else show(value)

        try:
            function(answer, **arguments)
        except Exception as error:
            _refuse(error, as_json=as_json)

    functools.update_wrapper(run, function)
    run.__doc__ = with_exit_codes(function.__doc__ or "", EXIT_CODES)
    return click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")(run)


def configured(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say which ledger is meant; the command gets the `config` that follows from them."""

    def run(*arguments: Any, config_file: Path | None, state_dir: str | None, database: str | None, **more: Any) -> None:
        overrides = {"state_dir": state_dir, "database": database}
        config: Config = load(config_file or default_file(), daemon_overrides=overrides)
        function(*arguments, config=config, **more)

    functools.update_wrapper(run, function)
    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _refuse(error: Exception, *, as_json: bool) -> NoReturn:
    """Raises click's Exit with the code, or the error itself if nobody expects it."""
    from tmd.ledger.backup import CannotBackUp
    from tmd.ledger.engine import BadDatabaseUrl
    from tmd.ledger.errors import LedgerUnavailable
    from tmd.ledger.existing import NoLedger
    from tmd.ledger.revisions import UnknownRevision

    usage = isinstance(error, ConfigError | BadDatabaseUrl)
    if not usage and not isinstance(error, CannotBackUp | LedgerUnavailable | NoLedger | UnknownRevision):
        raise error
    complain(getattr(error, "message", str(error)), getattr(error, "remedy", ""), as_json=as_json)
    raise click.exceptions.Exit(EXIT_USAGE if usage else EXIT_REFUSED) from None
