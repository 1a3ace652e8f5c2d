"""The benchmark whose figures are in docs/measurements.md runs and writes what its reader expects. No figure is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def test_reads_and_drains_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "slurm_nodes"
    command = [sys.executable, "-m", "bench.slurm_nodes", "--out", str(out), "--nodes", "50", "--rounds", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-4000:]
    written = json.loads((out / "slurm_nodes.json").read_text())
    assert written["nodes"] == 50
    assert all(cost["wall_ms"] > 0 and cost["cpu_ms_commands"] > 0 for cost in written["reads"].values())
    assert set(written["reads"]) == {"all nodes", "one node", "all jobs"}
    assert written["drain_to_event_ms"]["worst"] >= written["drain_to_event_ms"]["median"] > 0
