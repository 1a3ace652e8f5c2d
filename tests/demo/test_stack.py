"""The daemon of demo and benchmarks is the one in its folder, whatever the caller's shell is set up for, and ends with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.demo.left_behind import ROOT, started, until
from tmd.demo.stack import Stack
from tmd.nodes.local_processes import pids_of
from tmd.nodes.local_state import Book


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


def test_a_demo_that_is_told_to_end_takes_everything_with_it(tmp_path: Path) -> None:
    """Ctrl-C and timeout(1) tell its whole group of processes, and again and again, also while it is ending."""
    with started("tmd.demo", ["--out", str(tmp_path / "out"), "--steps", "100000"], tmp_path / "output") as demo:
        until(lambda: len(demo.running()) > 8, "the daemon, the agents and the ranks have been started")
        demo.tell_to_end(signal.SIGTERM)
        assert demo.says("interrupted; everything that ran has been ended")
        assert not demo.running()


STUBBORN = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1], str(time.monotonic_ns())).touch()
time.sleep(600)
"""


@pytest.mark.parametrize("daemon", ["runs", "was killed"])
def test_what_does_not_end_when_told_is_killed_beside_a_node_that_is_off(tmp_path: Path, daemon: str) -> None:
    """A refusal (that node is off already) or a dead daemon spare nothing."""
    script, running = tmp_path / "stubborn.py", tmp_path / "running"
    script.write_text(STUBBORN)
    running.mkdir()
    with Stack(tmp_path / "stack", nodes=3) as stack:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'worker'}"}
        stack.submit(nnodes=3, nproc_per_node=1, command=[str(script), str(running)], env=environment)
        until(lambda: len(list(running.iterdir())) == 3, "every rank runs")
        stack.client.post("/v1/local/nodes/n1/kill", {})
        lives = [
            life.mark
            for job in Book.load(tmp_path / "stack" / "state" / "local" / "cluster.json").jobs.values()
            for life in job.lives
        ]
        assert sum(len(pids_of(mark)) for mark in lives) == 4, "an agent and a rank on two nodes each"
        if daemon == "was killed":
            stack.kill()
    assert not [pid for mark in lives for pid in pids_of(mark)]
