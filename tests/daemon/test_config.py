"""The configuration: what is wrong is said with its place, and nothing wrong gets through."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tmd import config_reference
from tmd.config import Config, ConfigError, default_socket, load, load_with_origins, variable
from tmd.config_reference import Key

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
        ("[daemon]\nlog_fromat = 'json'", ["tmd.toml:2: daemon.log_fromat", "unknown key", "did you mean log_format"]),
        ("[core]\nheartbeat_s = 'fast'", ["core.heartbeat_s", "expected float", "'fast'"]),
        ("[core]\nheartbeat_s = -1.0", ["core.heartbeat_s", "positive"]),
        ("[core]\nheartbeat_s = nan", ["core.heartbeat_s", "positive"]),
        ("[core]\nrestart_limit = 1.5", ["core.restart_limit", "int"]),
        ("[core]\nobserve_only = 'yes'", ["core.observe_only", "expected bool"]),
        ("[core]\nheartbeat_s = 3.0", ["tmd.toml:2: core.heartbeat_timeout_s", "more than twice"]),
        ("[daemon]\nlog_format = 'xml'", ["daemon.log_format", "'logfmt' or 'json'", "'xml'"]),
        ("[daemon]\noperators = 'alice'", ["daemon.operators", "expected array"]),
        ("[health]\ndrain = ['gpu.xid:bad']", ["tmd.toml:2: health.drain", "CHECK or CHECK:SEVERITY", "'gpu.xid:bad'"]),
        ("[daemon]\ntcp_auth = 'none'", ["daemon.tcp_auth", "'auto' or 'munge' or 'token'", "'none'"]),
        ("[daemon]\nlisten = 'head'", ["daemon.listen", "host:port"]),
        ("[daemon]\nlisten = '[::1'", ["daemon.listen", "[IPv6 address]:port"]),
        ("[daemon]\nlisten = '[:::1'", ["daemon.listen", "[IPv6 address]:port"]),
        ("[daemon]\nlisten = '[::1]x:5'", ["daemon.listen", "[IPv6 address]:port"]),
        ("[daemon]\nlisten = '::1:5'", ["daemon.listen", "[IPv6 address]:port"]),
        ("[daemon]\nlisten = 'a b:1'", ["daemon.listen", "host:port"]),
        ("\n[demon]\nlisten = ''", ["tmd.toml:2: demon", "unknown section", "did you mean daemon"]),
        ("daemon = 3", ["tmd.toml:1: daemon", "expected a section"]),
        ("[local]\nnodes = 0", ["tmd.toml:2: local.nodes", "racks"]),
        ("[local]\nracks = 7", ["tmd.toml:2: local.nodes", "racks"]),
        ("[slurm]\nclient = 'rest'", ["slurm.client", "'auto' or 'commands' or 'pyslurm'"]),
        ("[slurm]\npoll_max_s = 0.05", ["tmd.toml:2: slurm.poll_min_s", "at most slurm.poll_max_s (0.05), got 0.1"]),
        (f"[slurm]\nhint_socket = '/{'x' * 120}'", ["tmd.toml:2: slurm.hint_socket", "107 bytes"]),
        ("\n\n[daemon", ["tmd.toml:3: not valid TOML", "Expected ']'"]),
        ("[daemon]\nlisten = 'a", ["tmd.toml:2: not valid TOML"]),
        ("a = 1\na = 2", ["tmd.toml:2: not valid TOML", "Cannot overwrite"]),
        ("[core]\n'heartbeat_s' = 'x'", ["tmd.toml:2: core.heartbeat_s: expected float"]),
        ("core.heartbeat_s = 1.0\ncore . heartbeat = 2", ["tmd.toml:2: core.heartbeat: unknown key"]),
        ("\ncore = { heartbeat = 2 }", ["tmd.toml:2: core.heartbeat: unknown key"]),
        ("[daemon]\r\noperators = [\r\n 'a',\r\n]\r\n# why\r\nx = 1", ["tmd.toml:6: daemon.x: unknown key"]),
        ('[daemon]\nlog_level = """\nheartbeat = 1\n"""\nx = 1', ["tmd.toml:2: daemon.log_level", "tmd.toml:5: daemon.x"]),
        ("[[local.nodes]]\nname = 'n1'\naddress = '127.0.0.1'\n\n[[local.nodes]]\nname = 1", ["tmd.toml:1: local.nodes"]),
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


def test_a_system_s_daemon_that_this_user_may_not_reach_is_meant_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that tmctl says who may, not that there is none; it ended in a traceback."""
    socket = tmp_path / "run" / "tmd.sock"
    socket.parent.mkdir()
    socket.parent.chmod(0)
    monkeypatch.setattr("tmd.config.SYSTEM_SOCKET", socket)
    monkeypatch.delenv("TMD_SOCKET", raising=False)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        assert default_socket() == socket
    finally:
        os.seteuid(user)
        socket.parent.chmod(0o700)


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    file = tmp_path / "tmd.toml"
    file.write_bytes(b"[daemon]\nlisten = '\xff'")
    with pytest.raises(ConfigError, match=r"tmd\.toml: not valid TOML: byte 19 is not UTF-8"):
        load(file, environ={})


def test_a_file_that_can_be_no_configuration_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/zero: larger than 128 KiB, which no configuration is"):
        load(Path("/dev/zero"), environ={})
    with pytest.raises(ConfigError, match=r"tmd\.toml: not valid TOML: nested too deeply"):
        load(written(tmp_path, "x = " + "[" * 100_000), environ={})


@pytest.mark.parametrize("key", ["state_dir", "socket"])
def test_a_path_that_cannot_be_is_refused(key: str, tmp_path: Path) -> None:
    file = written(tmp_path, f'[daemon]\n{key} = "/run/\\u0000x"')
    with pytest.raises(ConfigError, match=rf"tmd\.toml:2: daemon\.{key}: no path has a NUL character: '/run/\\x00x'"):
        load(file, environ={})


@pytest.mark.parametrize("key", ["state_dir", "socket"])
def test_a_path_that_is_no_text_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"command line: daemon\.{key}: not UTF-8: b'/run/x\\xff'"):
        load(environ={}, daemon_overrides={key: os.fsdecode(b"/run/x\xff")})


def test_every_value_is_known_with_its_origin(tmp_path: Path) -> None:
    file = written(tmp_path, "[daemon]\nlisten = 'a:1'\n\n[core]\nrestart_limit = 1\nheartbeat_s = 1.0")
    loaded = load_with_origins(file, environ={"TMD_CORE_RESTART_LIMIT": "2"}, daemon_overrides={"state_dir": "/line"})
    origins = {key: loaded.origin(*key.split(".")) for key in ("daemon.listen", "daemon.state_dir", "daemon.socket")}
    assert origins == {"daemon.listen": f"{file}:2", "daemon.state_dir": "command line", "daemon.socket": "default"}
    assert loaded.origin("core", "restart_limit") == "environment variable TMD_CORE_RESTART_LIMIT"
    assert loaded.origin("core", "heartbeat_s") == f"{file}:6"


def test_the_sample_is_made_from_the_code() -> None:
    """If not: tmctl config sample > etc/tmd.toml"""
    assert (ROOT / "etc" / "tmd.toml").read_text() == config_reference.sample()


def test_the_operators_tables_are_made_from_the_code() -> None:
    """If not: put what `python -m tmd.config_reference` prints below the mark in docs/operators.md."""
    document = (ROOT / "docs" / "operators.md").read_text()
    assert config_reference.tables() in document.partition("<!-- config:")[2]


def test_everything_in_the_sample_can_be_switched_on(tmp_path: Path) -> None:
    """A line that begins with # and no space is a setting; of a key that is shown twice, the last is the default."""
    switched_on: dict[tuple[str, str], str] = {}
    section = ""
    for line in config_reference.sample().splitlines():
        if line.startswith("["):
            section = line
            switched_on[section, ""] = line
        elif line.startswith("#") and not line.startswith("# "):
            switched_on[section, line[1:].partition(" = ")[0]] = line[1:]
    text = "\n".join(switched_on.values())
    load(written(tmp_path, text), environ={})
    defaults = msgspec.to_builtins(Config())
    for name, keys in tomllib.loads(text).items():
        assert set(keys) == set(defaults[name]), name
        for key, value in keys.items():
            shown = tuple(value) if isinstance(value, list) else value
            assert shown == defaults[name][key] or defaults[name][key] in ("", ()), key


@pytest.mark.parametrize("key", tuple(config_reference.described_keys()), ids=lambda key: f"{key.section}.{key.name}")
def test_every_key_is_described_and_can_be_overridden_by_the_environment(key: Key) -> None:
    assert key.description.endswith("."), "a sentence"
    value = tomllib.loads(f"x = {key.example}")["x"] if key.default_in_words else key.default
    text = ",".join(value) if isinstance(value, list | tuple) else str(value).lower() if isinstance(value, bool) else str(value)
    loaded = load_with_origins(environ={variable(key.section, key.name): text})
    assert loaded.origin(key.section, key.name) == f"environment variable {variable(key.section, key.name)}"
    taken = getattr(getattr(loaded.config, key.section), key.name)
    assert msgspec.json.encode(taken) == msgspec.json.encode(value)


@pytest.mark.parametrize("arguments", [["config", "check"], ["serve", "--config"]])
def test_the_command_ends_with_2_and_without_a_traceback(tmp_path: Path, arguments: list[str]) -> None:
    file = written(tmp_path, "[core]\nheartbeat = 1")
    done = subprocess.run(
        [sys.executable, "-m", "tmd.daemon.main", *arguments, str(file)], capture_output=True, text=True, timeout=30, cwd=ROOT
    )
    assert done.returncode == 2
    assert f"{file}:2: core.heartbeat: unknown key; did you mean heartbeat_s?" in done.stderr
    assert "Traceback" not in done.stderr
