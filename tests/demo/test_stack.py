"""The daemon of demo and benchmarks is the one in its folder, whatever the caller's shell is set up for, and ends with them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tmd.demo.stack import Stack


def test_the_callers_variables_do_not_reach_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("TMD_SOCKET", str(elsewhere / "tmd.sock"))
    monkeypatch.setenv("TMD_DATABASE", f"sqlite:///{elsewhere / 'ledger.db'}")
    monkeypatch.setenv("TMD_CORE_OBSERVE_ONLY", "true")
    monkeypatch.setenv("TMD_CONFIG", str(elsewhere / "tmd.toml"))
    with Stack(tmp_path / "stack", nodes=3, core={"hold_limit_s": 7.5}) as stack:
        status = stack.client.get("/v1/status")
        inherited = Path(f"/proc/{stack.pid}/environ").read_bytes().split(b"\0")
    assert status["observe_only"] is False
    assert status["ledger"]["url"] == f"sqlite:///{tmp_path / 'stack' / 'state' / 'ledger.db'}"
    assert not [variable for variable in inherited if variable.startswith(b"TMD_")]
    assert not elsewhere.exists()


def marked(mark: str) -> list[int]:
    """Every process that was started with this in its environment, or by such a one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_demo_that_is_told_to_end_takes_everything_with_it(tmp_path: Path) -> None:
    """As by Ctrl-C, which a process in the background of a shell does not hear."""
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "tmd.demo", "--out", str(tmp_path / "out"), "--steps", "100000"]
    demo = subprocess.Popen(command, env={**os.environ, "MARK_OF_TEST": mark}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until(lambda: len(marked(mark)) > 8, "the daemon, the agents and the ranks have been started")
        demo.terminate()
        output, _ = demo.communicate(timeout=60)
        assert demo.returncode == 130
        assert b"interrupted; everything that ran has been ended" in output
        until(lambda: not marked(mark), "nothing is left")
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        demo.wait(60)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
