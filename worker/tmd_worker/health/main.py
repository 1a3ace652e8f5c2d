"""`tmd-health`. Exit codes: 0 nothing worse than a warning, 1 something is wrong with this node, 2 wrong usage.

Slurm looks at neither (it logs what a check that fails prints): the node is drained by the daemon, if its policy says so. Slurm
passes no arguments, so options may stand in a file, as on the command line, one or several a line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tmd
from tmd.protocol.health import Finding, HealthReport
from tmd_worker.health import kernel_log, machine, site
from tmd_worker.health.reporting import NotReported, Reporter
from tmd_worker.health.running import Check, run

OPTIONS_FILE = Path("/etc/tmd/health.options")
EXIT_UNWELL, EXIT_USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args([*_from_file(os.environ), *given])
    checked, findings = run(_checks(options))
    findings = [finding for finding in findings if not _ignored(finding, options.ignore)][:256]
    for finding in findings:
        part = f" {finding.part}" if finding.part else ""
        print(f"{finding.check}{part} {finding.severity}: {finding.reason}")
    if options.daemon:
        _report(options, HealthReport(checked=tuple(dict.fromkeys(checked)), findings=tuple(findings)))
    sys.exit(EXIT_UNWELL if any(finding.severity != "warning" for finding in findings) else 0)


def _report(options: argparse.Namespace, report: HealthReport) -> None:
    """What cannot be reported is said, and reported by the next run: a daemon that is away makes no node unwell."""
    try:
        reporter = Reporter(options.daemon, token_file=options.token_file, munge_socket=options.munge_socket)
        reporter.send(options.node, report)
    except NotReported as error:
        print(f"tmd-health: not reported: {error}", file=sys.stderr)


def _checks(options: argparse.Namespace) -> list[Check]:
    root = options.root
    built_in = [
        Check("kernel log", kernel_log.COVERS, lambda: kernel_log.look(root, options.since_s)),
        Check("links", machine.LINKS, lambda: machine.links(root, options.nic)),
        Check("disks", machine.DISKS, lambda: machine.disks(root, options.disk or ["/", "/tmp"])),
        Check("memory", machine.MEMORY, lambda: machine.memory(root, options.memory_gib)),
        Check("heat", machine.HEAT, lambda: machine.heat(root)),
    ]
    return [*built_in, *site.checks(options.site_checks)]


def _ignored(finding: Finding, patterns: Sequence[str]) -> bool:
    return any(pattern in (finding.check, f"{finding.check}:{finding.part}") for pattern in patterns)


def _from_file(environ: Mapping[str, str]) -> list[str]:
    """Options of the file, before those of the command line, which overrule them."""
    file = Path(environ.get("TMD_HEALTH_OPTIONS") or OPTIONS_FILE)
    try:
        return shlex.split(file.read_text(), comments=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        print(f"tmd-health: {file} cannot be used: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    environ = os.environ
    parser = argparse.ArgumentParser(
        prog="tmd-health",
        description="Looks whether this node is fit to work, and tells the tmd daemon what is wrong.",
        epilog=f"Options are also read from {OPTIONS_FILE} (or $TMD_HEALTH_OPTIONS). Exit codes: 0 nothing worse than a warning, "
        "1 something is wrong, 2 wrong usage.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"tmd-health, version {tmd.__version__}")
    add("--daemon", default=environ.get("TMD_DAEMON", ""), help="unix:/path or http://host:port; without it only print.")
    add("--node", default=environ.get("SLURMD_NODENAME") or socket.gethostname(), help="Default: Slurm's, the host's name.")
    add("--token-file", type=Path, help="The reporters' token (tmctl health token), where there is no munge.")
    add("--munge-socket", default=environ.get("TMD_MUNGE_SOCKET", ""), help="Default: libmunge's own.")
    add("--since-s", type=float, default=900.0, help="How far back the kernel's log is read. Default: 900.")
    add("--nic", action="append", default=[], metavar="NAME", help="A card that must be there; may be repeated.")
    add("--disk", action="append", metavar="PATH", help="A file system to look at; may be repeated. Default: / and /tmp.")
    add("--memory-gib", type=float, default=0.0, help="What this node has at least.")
    add("--site-checks", type=Path, default=Path("/etc/tmd/health.d"), help="Programs of the site; not 0 is a finding.")
    add("--ignore", action="append", default=[], metavar="CHECK[:PART]", help="Known and accepted; may be repeated.")
    add("--root", type=Path, default=Path("/"), help="Where /proc, /sys and /dev are looked for.")
    return parser


if __name__ == "__main__":
    main()
