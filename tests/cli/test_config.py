"""`tmctl config`: what is wrong with the configuration, what it comes to, and what to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tmd.cli.main import main
from tmd.config import load


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tmd.config.SYSTEM_FILE", tmp_path / "etc.toml")
    for name in ("TMD_CONFIG", "TMD_SOCKET", "TMD_STATE_DIR", "TMD_DATABASE"):
        monkeypatch.delenv(name, raising=False)


def call(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, ["config", *arguments], env=environ)


def answer(*arguments: str, **environ: str) -> Any:
    result = call(*arguments, "--json", **environ)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tmd.toml"
    path.write_text("[daemon]\nstate_dir = '/s'\n\ndatabase = 'postgresql://tmd:se:cr@et@db/tmd'\n")
    return path


def test_show_tells_every_value_and_its_origin_and_hides_the_password(file: Path) -> None:
    shown = answer("show", str(file), TMD_CORE_HEARTBEAT_S="1")
    assert shown["daemon.state_dir"] == {"value": "/s", "from": f"{file}:2"}
    assert shown["daemon.socket"] == {"value": "/s/run/tmd.sock", "from": "default"}
    assert shown["daemon.database"] == {"value": "postgresql://tmd:***@db/tmd", "from": f"{file}:4"}
    assert shown["core.heartbeat_s"] == {"value": 1.0, "from": "environment variable TMD_CORE_HEARTBEAT_S"}
    for arguments in (["show", str(file)], ["check", str(file)], ["show", str(file), "--json"]):
        assert "cr@et" not in call(*arguments).output


def test_check_names_the_file_that_is_meant(file: Path, tmp_path: Path) -> None:
    assert answer("check")["file"] is None
    assert answer("check", TMD_CONFIG=str(file))["file"] == str(file)
    system = tmp_path / "etc.toml"
    system.write_text("[core]\nheartbeat = 1")
    result = call("check")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {system}:2: core.heartbeat: unknown key; did you mean heartbeat_s?\n"


def test_a_slip_in_the_environment_is_noted() -> None:
    notes = answer("check", TMD_CORE_HEARTBEATS="1", TMD_FAULTS="of another kind")["notes"]
    assert notes == ["the environment variable TMD_CORE_HEARTBEATS is no setting; did you mean TMD_CORE_HEARTBEAT_S?"]


@pytest.mark.parametrize(
    ("database", "says"),
    [
        ("mysql://x/y", "expected sqlite or postgresql, got 'mysql'"),
        ("postgresql//tmd:secret@db", "expected a URL such as"),
        ("postgresql://tmd:secret@db:port/tmd", "expected a URL such as"),
        ("postgresql://tmd:secret@[::1/tmd", "expected a URL such as"),
        ("sqlite://", "a ledger in memory would not outlive the daemon"),
    ],
)
def test_a_database_that_is_none_is_refused_without_its_password(database: str, says: str) -> None:
    result = call("check", "--json", TMD_DATABASE=database)
    assert result.exit_code == 2
    assert says in json.loads(result.stderr)["error"]
    assert "secret" not in result.output


def test_the_sample_can_be_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    path.write_text(call("sample").stdout)
    assert load(path, environ={}) == load(environ={})
    assert answer("check", str(path))["ok"]
