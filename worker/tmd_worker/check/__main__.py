"""`python -m tmd_worker.check [--json] [--world-size N] (SCRIPT | -m MODULE) [ARGUMENTS...]`: what `tmd-run --check` becomes.

Contract: the report goes to standard output, as one JSON object with --json; then what the script prints goes to standard error.
Exit code 0: nothing found that would be lost; 1: something was, or the script failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from tmd_worker import boot, guard, session
from tmd_worker.check.engine import CheckEngine
from tmd_worker.check.findings import Finding, count


class Reporter:
    """Writes the report, once."""

    def __init__(self, script: str, out: TextIO, *, as_json: bool) -> None:
        self._script, self._out, self._as_json = script, out, as_json
        self.done = False

    def __call__(self, findings: list[Finding], shadow_steps: int) -> None:
        self.done = True
        errors, warnings = count(findings, "error"), count(findings, "warning")
        if self._as_json:
            report = {
                "script": self._script,
                "ok": not errors,
                "shadow_steps": shadow_steps,
                "errors": errors,
                "warnings": warnings,
            }
            report["findings"] = [_as_dict(finding) for finding in findings]
            text = json.dumps(report)
        else:
            verdict = (
                f"{self._script}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')} after {shadow_steps} shadow steps"
            )
            text = "\n".join([*(finding.text() for finding in findings), verdict])
        print(text, file=self._out, flush=True)


def _counted(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in Finding.__dataclass_fields__}


def main(arguments: Sequence[str]) -> None:
    """Runs the script as `python SCRIPT` would. Raises SystemExit."""
    rest = list(arguments)
    as_json = rest[0] == "--json"
    if as_json:
        del rest[0]
    world_size = 2
    if rest[0] == "--world-size":
        world_size = int(rest[1])
        del rest[:2]
    out = _take_stdout() if as_json else sys.stdout
    module = rest[0] == "-m"
    script = rest[1] if module else rest[0]
    reporter = Reporter(script, out, as_json=as_json)
    session.engine_of_check = CheckEngine(world_size, reporter)
    guard.activate(0, "a check")
    what = "the script ended without calling Session.run(main)"
    try:
        if module:
            boot.run_module(script, rest[2:])
        else:
            boot.run_script(script, rest[1:])
    except SystemExit as ended:
        if reporter.done:
            raise
        what = f"the script ended with sys.exit({ended.code!r}) before it came to Session.run(main)"
    except Exception as error:
        traceback.print_exc()
        what = f"the script raised {type(error).__name__} before it came to Session.run(main): {error}"
    if not reporter.done:
        reporter([Finding(severity="error", kind="script", what=what, remedy="see docs/trainers.md")], 0)
    sys.exit(1)


def _take_stdout() -> TextIO:
    """Standard output as it was; from now on what is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main(sys.argv[1:])
