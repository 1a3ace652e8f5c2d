"""The demo's report: one JSON document for programs, one table for people. Times are milliseconds."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tmd.core.records import PHASES
from tmd.demo.losses import Comparison
from tmd.demo.run import Run


def document(run: Run, verdict: Comparison, normal_step_s: float) -> dict[str, Any]:
    """What `make demo` writes to out/demo/report.json."""
    return {
        "bit_identical": verdict.identical and not run.approximations,
        "differences": [*verdict.differences, *run.approximations],
        "log_lines_lost_with_a_rank": verdict.lines_lost,
        "undisturbed_step_ms": round(normal_step_s * 1e3, 1),
        "migrations": [_migration(record) for record in run.migrations],
        "stayers_restarted": run.stayers_restarted,
    }


def shortcomings(report: dict[str, Any]) -> list[str]:
    """Why a run with one drained and one killed node did not go as it must; empty if it did."""
    faults = []
    if not report["bit_identical"]:
        faults.append("the run differs from the undisturbed one")
    if report["stayers_restarted"]:
        faults.append(f"{report['stayers_restarted']} ranks had to restart that were not replaced")
    done = [each for each in report["migrations"] if each["state"] == "done"]
    kinds = {each["kind"] for each in done}
    if kinds != {"planned", "unplanned"}:
        faults.append(f"expected a planned and an unplanned migration, done were {sorted(kinds) or 'none'}")
    reopened = sum(each["stayer_links_reopened"] for each in done if each["kind"] == "planned")
    if reopened:
        faults.append(f"{reopened} links between stayers were opened anew by a planned move")
    return faults


def _migration(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": record["kind"],
        "state": record["state"],
        "trigger": record["trigger"],
        "reason": record["reason"],
        "ranks": sorted(int(rank) for rank in record["leavers"]),
        "from_nodes": record["from_nodes"],
        "to_nodes": record["to_nodes"],
        "phases": {phase: _ms(record["phases_s"].get(phase)) for phase in PHASES},
        "normal_step_ms": _ms(record["normal_step_s"]),
        "downtime_ms": _ms(record["downtime_s"]),
        "downtime_steps": None if record["downtime_steps"] is None else round(record["downtime_steps"], 2),
        "lost_time_ms": _ms(record["lost_time_s"]),
        "steps_redone": record["steps_redone"],
        "stayer_links_reopened": record["stayer_links_reopened"],
        "bytes_moved": record["bytes_moved"],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def show(report: dict[str, Any]) -> None:
    """Prints the table to stdout."""
    table = Table(title=f"migrations (ms; a step of the undisturbed run takes {report['undisturbed_step_ms']} ms)")
    for column in ("", *PHASES, "step before", "downtime", "in steps", "lost time", "redone"):
        table.add_column(column, justify="left" if not column else "right")
    for each in report["migrations"]:
        ranks = ", ".join(map(str, each["ranks"]))
        name = f"{each['kind']}, rank {ranks}: {'+'.join(each['from_nodes'])} to {'+'.join(each['to_nodes'])}"
        if each["state"] != "done":
            name += f" ({each['state']}: {each['reason']})"
        cells = [each["phases"][phase] for phase in PHASES]
        cells += [each["normal_step_ms"], each["downtime_ms"], each["downtime_steps"], each["lost_time_ms"], each["steps_redone"]]
        table.add_row(name, *("-" if cell is None else str(cell) for cell in cells))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
    for line in report["differences"]:
        print(f"DIFFERENT: {line}")
    words = "bit-identical to the undisturbed run" if report["bit_identical"] else "NOT bit-identical to the undisturbed run"
    print(f"losses of every rank and step, and the final state: {words}")
    print(f"ranks that were not replaced and had to restart: {report['stayers_restarted']}")
