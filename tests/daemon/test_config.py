"""The configuration: what is wrong is said with its place, and nothing wrong gets through."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tmd.config import Config, ConfigError, default_socket, load

ROOT = Path(__file__).parents[2]


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tmd.toml"
    file.write_text(text)
    return file


def test_nothing_given_is_enough() -> None:
    config = load(environ={})
    assert config.daemon.resource_manager == "local"
    assert config.core.heartbeat_s == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[daemon]\nlog_fromat = 'json'", ["daemon.log_fromat", "unknown key", "did you mean log_format"]),
        ("[core]\nheartbeat_s = 'fast'", ["core.heartbeat_s", "expected float", "'fast'"]),
        ("[core]\nheartbeat_s = -1.0", ["core.heartbeat_s", "positive"]),
        ("[core]\nheartbeat_s = nan", ["core.heartbeat_s", "positive"]),
        ("[core]\nrestart_limit = 1.5", ["core.restart_limit", "int"]),
        ("[core]\nobserve_only = 'yes'", ["core.observe_only", "expected bool"]),
        ("[core]\nheartbeat_s = 3.0", ["core.heartbeat_timeout_s", "more than twice"]),
        ("[daemon]\nlog_format = 'xml'", ["daemon.log_format", "'logfmt' or 'json'", "'xml'"]),
        ("[daemon]\noperators = 'alice'", ["daemon.operators", "expected array"]),
        ("[daemon]\nlisten = 'head'", ["daemon.listen", "host:port"]),
        ("[demon]\nlisten = ''", ["demon", "unknown section", "daemon"]),
        ("daemon = 3", ["daemon", "expected a section"]),
        ("[local]\nnodes = 0", ["[local] nodes", "racks"]),
        ("[daemon", ["not valid TOML", "Expected ']'"]),
        (f"[daemon]\nsocket = '/{'x' * 120}'", ["daemon.socket", "107 bytes"]),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_what_was_expected(tmp_path: Path, text: str, says: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(file, environ={})
    for part in says:
        assert part in str(refused.value)


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, "[daemon]\na = 1\n[core]\nb = 2\nheartbeat_s = ''"), environ={"TMD_CORE_RESTART_LIMIT": "many"})
    lines = str(refused.value).splitlines()
    assert len(lines) == 4
    assert any("environment variable TMD_CORE_RESTART_LIMIT" in line for line in lines)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load(tmp_path / "none.toml", environ={})


def test_the_command_line_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path, "[daemon]\nlisten = 'a:1'\ndatabase = 'sqlite:////file'\nstate_dir = '/file'\n[core]\nrestart_limit = 1"
    )
    environ = {"TMD_LISTEN": "b:2", "TMD_STATE_DIR": "/environment", "TMD_OPERATORS": "x, y", "TMD_CORE_RESTART_LIMIT": "2"}
    config = load(file, environ=environ, daemon_overrides={"state_dir": "/line", "listen": None})
    assert (config.state_dir, config.listen, config.database_url) == (Path("/line"), ("b", 2), "sqlite:////file")
    assert (config.daemon.operators, config.core.restart_limit) == (("x", "y"), 2)


def test_the_service_manager_chooses_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/tmd")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/tmd")
    config = load(environ={})
    assert (config.state_dir, config.socket) == (Path("/var/lib/tmd"), Path("/run/tmd/tmd.sock"))
    monkeypatch.setenv("TMD_SOCKET", "/elsewhere")
    assert default_socket() == Path("/elsewhere")


def test_the_sample_is_valid_and_documents_every_key_with_its_default(tmp_path: Path) -> None:
    sample = (ROOT / "etc" / "tmd.toml").read_text()
    load(ROOT / "etc" / "tmd.toml", environ={})
    shown = tomllib.loads("\n".join(_sections(sample)))
    defaults = msgspec.to_builtins(Config())
    for section, keys in defaults.items():
        assert set(shown[section]) == set(keys), section
        for key, value in keys.items():
            if key not in ("state_dir", "socket", "operators"):
                assert shown[section][key] == value, key


def _sections(sample: str) -> list[str]:
    """The sample with its settings switched on; of a key that is shown twice, the last."""
    lines: dict[tuple[str, str], str] = {}
    section = ""
    for line in sample.splitlines():
        if line.startswith("["):
            section = line
            lines[section, ""] = line
        elif line.startswith("#") and not line.startswith("# ") and "=" in line:
            lines[section, line[1:].split("=")[0].strip()] = line[1:]
    return list(lines.values())


@pytest.mark.parametrize("arguments", [["config", "check"], ["serve", "--config"]])
def test_the_command_ends_with_2_and_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    file = written(tmp_path, "[core]\nheartbeat = 1")
    done = subprocess.run(
        [sys.executable, "-m", "tmd.daemon.main", *arguments, str(file)], capture_output=True, text=True, timeout=30, cwd=ROOT
    )
    assert done.returncode == 2
    assert f"tmd: {file}: core.heartbeat: unknown key" in done.stderr
    assert "Traceback" not in done.stderr
