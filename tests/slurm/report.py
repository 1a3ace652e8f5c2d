"""out/slurm/report.json: what was shown on real daemons, with its figures. `python -m tests.slurm.report` prints it, and fails if
something of SCENARIOS is not in it: what has not run has not passed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ROOT

REPORT = ROOT / "out" / "slurm" / "report.json"

#: What a whole run of tests/slurm has to show; it may show more.
SCENARIOS = (
    "demo job: drain of a node",
    "demo job: kill of slurmd, stepd and rank of another node, after a refill from the pool",
    "three moves in a row",
    "two jobs at once",
    "drain of a standby",
    "drain of four nodes with one standby",
    "drain of the batch host",
    "move into the pool by expansion",
    "move into the pool by a companion job, which is cancelled then",
    "tmd killed -9 while a node of the pool is taken",
    "drain taken back before the flip",
    "slurmctld restarted in the middle of a move",
    "slurmdbd down",
    "tmd killed -9 in the middle of a move",
    "munge down in the middle of a move",
    "job without the flag: as without the plugins",
    "jobs of two users under a daemon of its own user",
    "binding, GPUs, limits, container options and output of a joiner",
    "drain of a node of one task of an array",
    "scancel",
    "time limit",
    "suspend and resume",
    "requeue",
    "state=fail, datagrams lost",
    "maintenance",
    "reboot",
    "state=power_down",
    "state=down",
    "preemption",
)


class Report:
    """Grows with each scenario that has come to its end; one that runs again replaces its figures."""

    def __init__(self, version: str, path: Path = REPORT) -> None:
        self._version = version
        self._path = path

    def add(
        self,
        name: str,
        moves: list[dict[str, Any]],
        *,
        bit_identical: bool | None = True,
        event_latency_ms: float | None = None,
        node_release_ms: float | None = None,
    ) -> None:
        """To be called once the scenario has been seen to its end, and the run compared with the undisturbed one. `moves`: the
        migrations' records. `bit_identical` None: it is not about losses and state."""
        scenario = {
            "name": name,
            "bit_identical": bit_identical,
            "event_latency_ms": _rounded(event_latency_ms),
            "node_release_ms": _rounded(node_release_ms),
            "phases": {phase: _rounded(seconds * 1000) for phase, seconds in moves[-1]["phases_s"].items()} if moves else {},
            "downtime_ms": max((_rounded(s * 1000) for move in moves if (s := move["downtime_s"]) is not None), default=None),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scenarios = [*(each for each in self._known() if each["name"] != name), scenario]
        self._path.write_text(json.dumps({"slurm": self._version, "scenarios": scenarios}, indent=2) + "\n")

    def _known(self) -> list[dict[str, Any]]:
        """What is there of this version of Slurm."""
        written = json.loads(self._path.read_text()) if self._path.exists() else {}
        return written["scenarios"] if written.get("slurm") == self._version else []


def shown(path: Path) -> list[dict[str, Any]]:
    scenarios: list[dict[str, Any]] = json.loads(path.read_text())["scenarios"] if path.exists() else []
    return scenarios


def missing(path: Path) -> list[str]:
    """Of SCENARIOS, what this report does not show. A name may go on with what a machine could not give to it."""
    names = [each["name"] for each in shown(path)]
    return [wanted for wanted in SCENARIOS if not any(name == wanted or name.startswith(f"{wanted}, without ") for name in names)]


def main() -> None:
    for each in shown(REPORT):
        figures = (each["event_latency_ms"], each["node_release_ms"], each["downtime_ms"])
        words = ("drain to tmd", "node given back after", "downtime")
        told = [f"{word} {value:g} ms" for word, value in zip(words, figures, strict=True) if value is not None]
        print(f"{each['name']}: {', '.join(told) or 'as it should be'}")
    for each in shown(REPORT):
        name, _, lacking = each["name"].partition(", without ")
        if lacking and name in SCENARIOS:
            print(f"NOT ALL OF IT was shown: this machine has no {lacking} for: {name}", file=sys.stderr)
    if absent := missing(REPORT):
        sys.exit("not shown on a real Slurm in this run:\n" + "\n".join(f"  {name}" for name in absent))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


if __name__ == "__main__":
    main()
