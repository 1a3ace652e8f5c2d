"""`make bench-handoff` writes what its reader expects."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench.handoff import CONTESTANTS, main
from bench.handoff_sources import CONDITIONS


def test_the_transfers_are_written_with_every_contestant(tmp_path: Path) -> None:
    out = tmp_path / "handoff.json"
    options = ["--out", str(out), "--transfer-mib", "9", "--sources-mib", "33", "--rounds", "2", "--no-migrations"]
    result = CliRunner().invoke(main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    transfer, sources = written["transfer"], written["sources"]
    assert (transfer["bytes"], transfer["rounds"]) == (9 << 20, 2)
    assert all(transfer[f"{who}_mib_s"] > 0 for who in CONTESTANTS)
    assert all(transfer[f"{who}_ratio"] > 0 for who in CONTESTANTS[1:])
    assert (sources["bytes"], sources["rounds"]) == (33 << 20, 2)
    assert all(sources[condition][f"{who}_ratio"] > 0 for condition in CONDITIONS for who in ("two", "four"))
    assert sources["paced"]["one_mib_s"] <= sources["pace_mib_s"] * 1.1


def test_a_size_that_makes_no_sense_is_refused() -> None:
    result = CliRunner().invoke(main, ["--size", "5"])
    assert result.exit_code == 2
    assert "say millions of parameters and at least 2 ranks" in result.output
