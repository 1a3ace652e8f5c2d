"""The stage fails for what it has not shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm import report as reports
from tests.slurm.report import SCENARIOS, Report, missing


def test_what_was_not_shown_is_named_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert missing(path) == list(SCENARIOS)
    report = Report("22.05.8", path)
    for name in SCENARIOS[1:]:
        report.add(name, [])
    assert missing(path) == [SCENARIOS[0]]
    moves = [{"phases_s": {"copy": 0.0021}, "downtime_s": seconds} for seconds in (0.01, 0.004)]
    report.add(SCENARIOS[0], moves, event_latency_ms=12.34)
    report.add(SCENARIOS[0], moves, event_latency_ms=23.45)
    assert missing(path) == []
    written = json.loads(path.read_text())
    assert written["slurm"] == "22.05.8"
    (shown,) = [each for each in written["scenarios"] if each["name"] == SCENARIOS[0]]
    assert (shown["event_latency_ms"], shown["phases"], shown["downtime_ms"]) == (23.4, {"copy": 2.1}, 10.0)


def test_what_this_machine_could_not_give_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "REPORT", tmp_path / "report.json")
    report = Report("22.05.8", tmp_path / "report.json")
    for name in SCENARIOS[1:]:
        report.add(name, [])
    report.add(f"{SCENARIOS[0]}, without control groups", [])
    reports.main()
    said = capsys.readouterr().err
    assert said == f"NOT ALL OF IT was shown: this machine has no control groups for: {SCENARIOS[0]}\n"
