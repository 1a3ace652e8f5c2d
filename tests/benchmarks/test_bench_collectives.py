"""`make bench-collectives` writes what its reader expects."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench.collectives import LINKS, OPERATIONS, main


def test_every_cell_is_written_with_both_contestants(tmp_path: Path) -> None:
    out = tmp_path / "collectives.json"
    options = ["--out", str(out), "--ranks", "2", "--rounds", "2", "--max-bytes", "4096"]
    result = CliRunner().invoke(main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    cells = {(row["op"], row["ranks"], row["bytes"], row["link"]) for row in rows}
    sizes = {operation: [1024, 4096] if operation != "barrier" else [0] for operation in OPERATIONS}
    assert cells == {(operation, 2, size, link) for operation in OPERATIONS for size in sizes[operation] for link in LINKS}
    for row in rows:
        assert abs(row["ratio"] - row["gloo_ms"] / row["delta_ms"]) <= 0.01 * row["ratio"] + 0.001
        assert min(row["delta_ms"], row["gloo_ms"], row["delta_cpu_ms"], row["gloo_cpu_ms"]) > 0
    assert "| operation | ranks | | 1 KiB | 4 KiB |" in out.with_suffix(".md").read_text()
