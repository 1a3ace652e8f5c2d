"""`tmctl config`: what the daemon's configuration says, what is wrong with it, and where each value comes from."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from tmd import config_reference
from tmd.cli.offline import Answer, offline
from tmd.cli.output import Listing, show
from tmd.config import Loaded, default_file, load_with_origins, variable

_FILE = click.Path(path_type=Path, dir_okay=False)
#: A variable that resembles the name of a setting this much is taken for a slip.
_RESEMBLANCE = 0.85


@click.group()
def config() -> None:
    """The daemon's configuration: one TOML file, overridden by the environment, overridden by the command line."""


@config.command("check")
@click.argument("file", type=_FILE, required=False)
@offline
def check_config(answer: Answer, file: Path | None) -> None:
    """Say all that is wrong with FILE and with the variables TMD_* of the environment, each with its place, or that nothing is.

    Without FILE: TMD_CONFIG, then /etc/tmd/tmd.toml if it is there, else the environment alone.

    \b
    Examples:
      tmctl config check
      tmctl config check etc/tmd.toml
    """
    file = file or default_file()
    loaded = _load(file)
    answer(
        {
            "file": str(file) if file else None,
            "ok": True,
            "notes": _slips(),
            **{name: _shown(loaded, "daemon", name) for name in ("state_dir", "socket", "database")},
        },
        _show_check,
    )


@config.command("show")
@click.argument("file", type=_FILE, required=False)
@offline
def show_config(answer: Answer, file: Path | None) -> None:
    """Every setting as the daemon would take it, and where it comes from: a line of FILE, the environment, or the default.

    Passwords are hidden. Without FILE as in `tmctl config check`.

    \b
    Examples:
      tmctl config show /etc/tmd/tmd.toml
      TMD_CORE_HEARTBEAT_S=1 tmctl config show --json
    """
    loaded = _load(file or default_file())
    values = {
        f"{key.section}.{key.name}": {
            "value": _shown(loaded, key.section, key.name),
            "from": loaded.origin(key.section, key.name),
        }
        for key in config_reference.described_keys()
    }
    rows = [(name, json.dumps(each["value"]), each["from"]) for name, each in values.items()]
    answer(values, lambda _: show(Listing(("key", "value", "from"), rows)))


@config.command("sample")
@offline
def sample(answer: Answer) -> None:
    """Print a configuration in which every key is explained and switched off, to start from.

    \b
    Example:
      tmctl config sample > /etc/tmd/tmd.toml
    """
    answer({"sample": config_reference.sample()}, lambda value: click.echo(value["sample"], nl=False))


def _load(file: Path | None) -> Loaded:
    """Raises ConfigError, BadDatabaseUrl."""
    from tmd.ledger.engine import parse_url

    loaded = load_with_origins(file)
    parse_url(loaded.config.database_url)
    return loaded


def _shown(loaded: Loaded, section: str, key: str) -> Any:
    """The value that counts, as plain data, without passwords."""
    from tmd.ledger.engine import without_password

    config = loaded.config
    match section, key:
        case "daemon", "state_dir":
            return str(config.state_dir)
        case "daemon", "socket":
            return str(config.socket)
        case "daemon", "database":
            return without_password(config.database_url)
    return msgspec.to_builtins(getattr(getattr(config, section), key))


def _show_check(checked: dict[str, Any]) -> None:
    click.echo(f"{checked['file'] or 'no file, the environment alone'}: ok")
    click.echo(f"state directory {checked['state_dir']}, socket {checked['socket']}, ledger {checked['database']}")
    for note in checked["notes"]:
        click.echo(f"note: {note}")


def _slips() -> list[str]:
    """Variables of the environment that are no settings and look like one."""
    known = {variable(key.section, key.name) for key in config_reference.described_keys()}
    found = []
    for name in sorted(name for name in os.environ if name.startswith("TMD_") and name not in known):
        close = difflib.get_close_matches(name, known, n=1, cutoff=_RESEMBLANCE)
        found += [f"the environment variable {name} is no setting; did you mean {each}?" for each in close]
    return found
