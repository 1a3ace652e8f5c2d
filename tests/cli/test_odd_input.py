"""Nothing that a user can type, or have around, ends in a traceback: bytes that are no text, a directory that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.fake_daemon import FakeDaemon

ROOT = Path(__file__).parents[2]
ODD = b"\xff"

WITH_ARGUMENTS = [
    [b"story", ODD],
    [b"drain", ODD, b"--reason", b"fan"],
    [b"drain", b"n1", b"--reason", ODD],
    [b"resume", ODD],
    [b"migrate", ODD, b"--rank", b"1"],
    [b"migrate", b"local-1", b"--node", ODD],
    [b"migrations", b"--job", ODD],
    [b"job", b"show", ODD],
    [b"local", b"job", ODD],
    [b"local", b"down", b"n1", b"--reason", ODD],
    [b"local", b"run", b"--log-dir", ODD, b"--", b"-c", b"pass"],
    [b"local", b"run", b"--", b"-c", ODD],
    [b"ledger", b"check", b"--state-dir", ODD],
    [b"config", b"check", ODD],
]


def call(daemon: FakeDaemon, *arguments: bytes, cwd: Path | None = None, **more: bytes) -> subprocess.CompletedProcess[str]:
    """As a shell calls it: arguments and environment are bytes."""
    environ = {**os.environb, b"PYTHONPATH": os.fsencode(ROOT), b"TMD_SOCKET": os.fsencode(daemon.socket)}
    environ |= {os.fsencode(name): value for name, value in more.items()}
    command = [os.fsencode(sys.executable), b"-m", b"tmd.cli.main", *arguments]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", WITH_ARGUMENTS, ids=lambda arguments: b" ".join(arguments).decode(errors="replace"))
def test_an_argument_that_is_no_text_is_named_and_refused(daemon: FakeDaemon, arguments: list[bytes]) -> None:
    result = call(daemon, *arguments)
    assert result.returncode == 2, result.stderr
    assert r"xff" in result.stderr or r"\udcff" in result.stderr
    assert "Traceback" not in result.stderr
    assert daemon.asked == []


def test_a_socket_that_is_no_text_is_looked_for(daemon: FakeDaemon) -> None:
    result = call(daemon, b"--socket", ODD, b"status")
    assert result.returncode == 2
    assert result.stderr.startswith("error: no daemon at ")


def test_a_variable_that_is_no_text_is_left_out_and_named(daemon: FakeDaemon) -> None:
    daemon.answers["POST /v1/local/jobs"] = (201, {"job_id": "local-1"})
    result = call(daemon, b"local", b"run", b"--json", b"--", b"-c", b"pass", ODD_ONE=ODD, GOOD="blå".encode())
    assert result.returncode == 0, result.stderr
    assert "warning: not UTF-8, so not in the job's environment: ODD_ONE" in result.stderr
    sent = daemon.asked[-1][1]["env"]
    assert (sent["GOOD"], "ODD_ONE" in sent) == ("blå", False)


def test_a_directory_that_is_gone_is_no_place_for_a_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'rmdir "{gone}"; exec "$0" -m tmd.cli.main local run -- -c pass'
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMD_SOCKET": str(daemon.socket)}
    command = ["/bin/sh", "-c", script, sys.executable]
    result = subprocess.run(command, env=environ, cwd=gone, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "a job runs in the directory it is started in, and there is none" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_directory_that_is_no_text_is_no_place_for_a_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(ODD)
    odd.mkdir()
    result = call(daemon, b"local", b"run", b"--", b"-c", b"pass", cwd=odd)
    assert result.returncode == 2
    assert r"\xff' is not UTF-8: start the job from another one" in result.stderr
