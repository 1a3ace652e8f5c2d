"""Checks that others have written: LBNL NHC, NVIDIA's DCGM, and the site's own programs.

NHC is run so that it marks no node offline by itself: what follows from its verdict is the daemon's policy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tmd.protocol.health import Finding, Severity
from tmd_worker.health.running import Check

NHC_TIMEOUT_S, DCGM_TIMEOUT_S, SITE_TIMEOUT_S = 40.0, 20.0, 30.0
#: Beside PATH, which slurmd keeps short.
_PLACES = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"
_NHC_FAILED = re.compile(r"Health check failed:\s*(?:(?P<check>check_\w+):\s*)?(?P<why>.*)")
_DCGM_SEVERITIES: dict[str, Severity] = {"warning": "warning", "failure": "error"}


def checks(folder: Path) -> list[Check]:
    """Those that are here: nhc, dcgmi, and the executable files of `folder`."""
    found = []
    if nhc := _program("nhc"):
        found.append(Check("nhc", ("site.nhc",), lambda: look_nhc(nhc), NHC_TIMEOUT_S))
    if dcgmi := _program("dcgmi"):
        found.append(Check("dcgmi", ("gpu.dcgm",), lambda: look_dcgm(dcgmi), DCGM_TIMEOUT_S))
    for program in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = re.sub("[^A-Za-z0-9_.-]", "_", program.name)[:64]
        if program.is_file() and os.access(program, os.X_OK):
            found.append(Check(name, (f"site.{name}",), _looker(program, f"site.{name}"), SITE_TIMEOUT_S))
    return found


def look_nhc(program: str) -> list[Finding]:
    """One finding at most: NHC ends with the first check that fails."""
    code, said = _run([program, "MARK_OFFLINE=0", "DETACHED_MODE=0", f"TIMEOUT={NHC_TIMEOUT_S - 5:.0f}"])
    if code == 0:
        return []
    failed = _NHC_FAILED.search(said)
    reason = failed["why"] if failed else f"ended with code {code}: {_first(said)}"
    return [_finding("site.nhc", "error", (failed["check"] or "") if failed else "", reason)]


def look_dcgm(program: str) -> list[Finding]:
    """What DCGM's background watches have seen. Without watches (dcgmi health --set) it knows nothing, and says so."""
    code, said = _run([program, "health", "--check", "--group", "0", "--json"])
    try:
        report = json.loads(said)
    except ValueError:
        return [_finding("gpu.dcgm", "warning", "", f"dcgmi health ended with code {code}: {_first(said)}")]
    return [_finding("gpu.dcgm", severity, part, reason) for part, severity, reason in _troubles(report.get("body", {}), "")]


def _troubles(body: Any, path: str) -> Iterator[tuple[str, Severity, str]]:
    """(part, severity, reason) of the innermost entries with a value of Warning or Failure; the report nests systems in GPUs."""
    if not isinstance(body, dict):
        return
    for name, entry in body.items():
        if not isinstance(entry, dict) or name == "Overall Health":
            continue
        place = f"{path}/{name}" if path else name
        inner = list(_troubles(entry.get("children", {}), place))
        severity = _DCGM_SEVERITIES.get(str(entry.get("value", "")).lower())
        if inner or severity is None:
            yield from inner
        else:
            yield place[:128], severity, _details(entry.get("children", {})) or str(entry["value"])


def _details(children: Any) -> str:
    values = (str(each.get("value", "")) for each in children.values()) if isinstance(children, dict) else ()
    return "; ".join(value for value in values if value)


def _looker(program: Path, check: str) -> Any:
    def look() -> list[Finding]:
        code, said = _run([str(program)])
        return [] if code == 0 else [_finding(check, "error", "", _first(said) or f"ended with code {code}")]

    return look


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and what it printed. The process that called this has a deadline, and takes the program along."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.decode(errors="replace")


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_PLACES)


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _finding(check: str, severity: Severity, part: str, reason: str) -> Finding:
    return Finding(check=check, severity=severity, part=part, reason=reason[:400])
