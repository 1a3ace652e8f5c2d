"""The benchmarks whose figures are in the documents run and write what the documents say. No figure is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 300


def run(module: str, out: Path, *arguments: str) -> Any:
    """What the benchmark has written, by the name of the file."""
    command = [sys.executable, "-m", module, "--out", str(out), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    files = [out] if out.is_file() else list(out.glob("*.json"))
    (file,) = files
    return json.loads(file.read_text())


def test_recovery(tmp_path: Path) -> None:
    written = run("bench.recovery", tmp_path / "recovery", "--kills", "1", "--resident-mib", "16")
    assert [kill["first_commit_ms"] > 0 for kill in written["kills"]] == [True]
    assert written["summary"]["kills"] == 1


def test_steady_state(tmp_path: Path) -> None:
    written = run("bench.steady", tmp_path / "steady", "--rounds", "1", "--ranks", "2", "--steps", "8")
    assert written["ratio"] > 0
    assert written["largest_relative_loss_difference"] < 1e-2


def test_bookkeeping(tmp_path: Path) -> None:
    written = run("bench.bookkeeping", tmp_path / "bookkeeping", "--ranks", "2", "--steps", "500")
    assert written["tmd"]["step_us"] > written["plain"]["step_us"] > 0
    assert written["tmd"]["cpu_us_per_rank"] > 0
    assert written["bookkeeping"]["step_us"] > 0
    assert written["vote"]["round_us"] > 0
