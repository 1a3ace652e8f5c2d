"""`tmctl doctor` as it is called: what it prints, how it ends, and that nothing keeps it from ending."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.conftest import Tmctl
from tests.cli.fake_daemon import FakeDaemon
from tests.doctor.sample import daemon as sample
from tmd.cli.main import main
from tmd.config import Config
from tmd.doctor import examine
from tmd.doctor.facts import Facts
from tmd.doctor.findings import ok


@pytest.fixture
def state_dir(tmp_path: Path) -> str:
    (tmp_path / "state").mkdir(mode=0o700)
    return str(tmp_path / "state")


def answer(daemon: FakeDaemon, **changes: Any) -> None:
    daemon.answers["GET /v1/status"] = dict(sample(resource_manager="local", **changes).status)
    daemon.answers["GET /v1/jobs?limit=1"] = {"jobs": []}


def test_without_slurm_its_checks_are_left_out_and_that_is_said(daemon: FakeDaemon, tmctl: Tmctl, state_dir: str) -> None:
    answer(daemon)
    result = tmctl("doctor", "--state-dir", state_dir, "--strict")
    assert result.exit_code == 0, result.output
    assert "resource_manager is local, so there are no checks of Slurm" in result.output
    assert result.output.endswith("0 faults, 0 warnings\n")


def test_warnings_count_only_with_strict(daemon: FakeDaemon, tmctl: Tmctl, state_dir: str) -> None:
    answer(daemon, paused=True)
    assert tmctl("doctor", "--state-dir", state_dir).exit_code == 0
    strict = tmctl("doctor", "--state-dir", state_dir, "--strict", "--json")
    assert strict.exit_code == 1
    told = json.loads(strict.output)
    assert (told["faults"], told["warnings"]) == (0, 1)
    (paused,) = [finding for finding in told["findings"] if finding["level"] == "warning"]
    assert paused == {
        "point": "mode",
        "level": "warning",
        "seen": "planned migrations are paused",
        "remedy": "tmctl unpause",
    }


def test_no_daemon_is_a_fault_with_a_remedy(tmp_path: Path, state_dir: str) -> None:
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), "doctor", "--state-dir", state_dir])
    assert result.exit_code == 2
    assert "there is no such socket" in result.output
    assert "what to do: start it (systemctl start tmd" in result.output


def test_a_configuration_that_cannot_be_used_is_the_only_finding(tmp_path: Path) -> None:
    file = tmp_path / "tmd.toml"
    file.write_text("[core]\nheartbeat = 1\n")
    result = CliRunner().invoke(main, ["doctor", "--config", str(file), "--json"])
    assert result.exit_code == 2
    (finding,) = json.loads(result.output)["findings"]
    assert finding["point"] == "configuration"
    assert "did you mean heartbeat_s?" in finding["seen"]


def test_another_machine_is_not_looked_at_from_afar() -> None:
    result = CliRunner().invoke(main, ["--daemon", "http://head:7070", "doctor"])
    assert result.exit_code == 2
    assert "run it on the head node" in result.output


def test_a_check_that_hangs_is_a_fault_of_its_own_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "CHECK_TIMEOUT_S", -3.0)  # and slurm.query_timeout_s, 5 s
    released = threading.Event()

    def hangs(_: Facts) -> list[Any]:
        released.wait(60)
        return []

    try:
        findings = examine.run_all(Facts(Config()), {"quick": lambda _: [ok("quick", "well")], "stuck": hangs})
    finally:
        released.set()
    assert [(finding.point, finding.level) for finding in findings] == [("quick", "ok"), ("stuck", "fault")]
