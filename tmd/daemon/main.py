"""`tmd`: the daemon, with the commands of tmctl that need none (`ledger`, `config`).

Exit codes: 0 stopped as asked, 1 cannot start, 2 wrong usage or configuration, 70 broke and should be started again, 75 another
daemon has taken the ledger over.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

import click

import tmd
from tmd.cli.config import config
from tmd.cli.ledger import ledger
from tmd.config import Config, ConfigError, load
from tmd.daemon import logs

EXIT_CANNOT_START = 1
EXIT_USAGE = 2
EXIT_BROKEN = 70
EXIT_TAKEN_OVER = 75

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tmd.__version__, prog_name="tmd")
def main() -> None:
    """tmd replaces a machine of a running training job; the other ranks never stop.

    \b
    Examples:
      tmd serve                                   run the daemon; tmctl talks to it
      tmd config check /etc/tmd/tmd.toml          before starting it again
      tmd ledger check
    """


@main.command()
@click.option("--config", "config_file", type=_FILE, envvar="TMD_CONFIG", help="TOML file; see etc/tmd.toml.")
@click.option("--state-dir", metavar="DIR", help="Ledger, tokens and lock. Default: the user's state directory.")
@click.option("--socket", metavar="PATH", help="Unix socket of the API. Default: DIR/run/tmd.sock.")
@click.option("--listen", metavar="HOST:PORT", help="TCP address for agents on other machines. Default: none.")
@click.option("--database", metavar="URL", help="Ledger, for example postgresql://tmd@db/tmd. Default: SQLite in DIR.")
@click.option("--resource-manager", type=click.Choice(["local", "slurm", "none"]), help="Where nodes come from. Default: local.")
@click.option("--observe-only", is_flag=True, default=None, help="Watch and say what would be done; do nothing.")
@click.option("--log-format", type=click.Choice(["logfmt", "json"]), help="Default: logfmt.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
def serve(config_file: Path | None, observe_only: bool | None, **daemon: str | None) -> None:
    """Run the daemon in the foreground. It is ready when it logs `ready:`.

    \b
    Examples:
      tmd serve
      tmd serve --config /etc/tmd/tmd.toml --listen :7070 --resource-manager none
      tmd serve --state-dir /tmp/tmd-try
    """
    config = _load(config_file, daemon, {"observe_only": observe_only})
    from sqlalchemy.exc import DBAPIError

    from tmd.daemon.identity import UnknownUser
    from tmd.daemon.notify import Notifier
    from tmd.daemon.service import CannotStart, serve
    from tmd.ledger.engine import BadDatabaseUrl
    from tmd.ledger.errors import LedgerTakenOver, LedgerUnavailable
    from tmd.ledger.revisions import UnknownRevision

    logs.configure(config.daemon.log_format, config.daemon.log_level)
    try:
        asyncio.run(serve(config, notifier=Notifier()))
    except (BadDatabaseUrl, UnknownUser) as error:
        _end(EXIT_USAGE, str(error))
    except (CannotStart, LedgerUnavailable, UnknownRevision, DBAPIError, OSError) as error:
        _end(EXIT_CANNOT_START, f"cannot start: {error}")
    except LedgerTakenOver as error:
        _end(EXIT_TAKEN_OVER, str(error))
    except Exception as error:
        _end(EXIT_BROKEN, f"the daemon broke ({error!r}); jobs go on, start it again; the log above has the traceback")


for each in (ledger, config):
    main.add_command(each)


def _load(file: Path | None, daemon: dict[str, str | None], core: dict[str, bool | None]) -> Config:
    try:
        return load(file, daemon_overrides=daemon, core_overrides=core)
    except ConfigError as error:
        _end(EXIT_USAGE, str(error))


def _end(code: int, text: str) -> NoReturn:
    click.echo(f"tmd: {text}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
