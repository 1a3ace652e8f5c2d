"""out/slurm/report.json: what was shown on real daemons, with its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.cluster import ROOT

REPORT = ROOT / "out" / "slurm" / "report.json"


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
        event_latency_ms: float | None = None,
        node_release_ms: float | None = None,
    ) -> None:
        """To be called once the run has been compared with the undisturbed one. `moves`: the migrations' records."""
        scenario = {
            "name": name,
            "bit_identical": True,
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
