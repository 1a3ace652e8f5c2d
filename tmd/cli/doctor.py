"""`tmctl doctor`: looks an installation over on the head node, and names the remedy for each fault."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from tmd.cli.output import count, show_json
from tmd.cli.shell import with_exit_codes
from tmd.config import SYSTEM_SOCKET, Config, ConfigError, default_file, load
from tmd.doctor.findings import Finding, Level, fault

EXIT_WARNINGS = 1
EXIT_FAULTS = 2
EXIT_CODES = "Exit codes: 0 done, no fault; 1 warnings, with --strict; 2 faults, or wrong usage."

_FILE = click.Path(path_type=Path, dir_okay=False)
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "fault": "red", "skipped": "bright_black"}


@click.command()
@click.option(
    "--config", "config_file", type=_FILE, help="TOML file. Default: TMD_CONFIG, then /etc/tmd/tmd.toml if it is there."
)
@click.option("--state-dir", metavar="DIR", help="Where the daemon keeps its ledger. Default: as configured.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there are warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, config_file: Path | None, state_dir: str | None, strict: bool, as_json: bool) -> None:
    """Look the installation over, point by point: versions, daemon, Slurm's plugins and parameters, munge, rights,
    files, port, clock, standbys. Says what was seen, and for each fault what to do. Changes nothing.

    Run it as root on the head node. The configuration is the daemon's own.

    \b
    Examples:
      tmctl doctor
      tmctl doctor --config /etc/tmd/tmd.toml --strict
      tmctl doctor --json
    """
    root = context.find_root()
    if root.get_parameter_source("daemon") is ParameterSource.COMMANDLINE:
        raise click.UsageError("doctor looks at the machine that it runs on: run it on the head node, without --daemon")
    findings = _findings(config_file or default_file(), state_dir, root.params.get("socket"))
    faults, warnings = (sum(each.level == level for each in findings) for level in ("fault", "warning"))
    if as_json:
        show_json({"faults": faults, "warnings": warnings, "findings": msgspec.to_builtins(findings)})
    else:
        _show(findings, faults, warnings)
    if faults or (warnings and strict):
        raise click.exceptions.Exit(EXIT_FAULTS if faults else EXIT_WARNINGS)


doctor.help = with_exit_codes(doctor.help or "", EXIT_CODES)


def _findings(file: Path | None, state_dir: str | None, path: Path | None) -> list[Finding]:
    from tmd.doctor.examine import examine
    from tmd.ledger.engine import BadDatabaseUrl, parse_url

    try:
        config = load(file, daemon_overrides={"state_dir": state_dir})
        parse_url(config.database_url)
    except (ConfigError, BadDatabaseUrl) as error:
        return [
            fault("configuration", str(error), "correct it (tmctl config check), then run this again: nothing else was looked at")
        ]
    named = f"{file}: ok" if file is not None else "no file, the environment alone: ok"
    return [Finding(point="configuration", level="ok", seen=named), *examine(config, path or _socket(config))]


def _socket(config: Config) -> Path:
    """Where the service's daemon listens is in no configuration: systemd gives it the folder."""
    if config.daemon.socket or os.path.exists(config.socket) or not os.path.exists(SYSTEM_SOCKET):
        return config.socket
    return SYSTEM_SOCKET


def _show(findings: list[Finding], faults: int, warnings: int) -> None:
    width = max(len(each.point) for each in findings)
    for each in findings:
        mark = click.style(each.level.ljust(len("warning")), fg=_STYLES[each.level])
        lines = each.seen.splitlines() or [""]
        if each.remedy:
            lines.append(f"what to do: {each.remedy}")
        click.echo(f"{mark}  {each.point.ljust(width)}  {lines[0]}")
        for line in lines[1:]:
            click.echo(f"{' ' * len('warning')}  {' ' * width}    {line}")
    click.echo(f"{count(faults, 'fault')}, {count(warnings, 'warning')}")
