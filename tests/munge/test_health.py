"""Health reports over TCP by munge: slurmd runs the check as root, so root reports; other users do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.daemon.rig import Daemon
from tests.daemon.test_agents import free_port
from tests.munge.munged import ALICE, Munged, run_as


def test_root_reports_and_nobody_else(make_daemon: Callable[..., Daemon], munged: Munged, tmp_path: Path) -> None:
    port = free_port()
    settings = {"TMD_MUNGE_SOCKET": munged.socket, "TMD_TCP_AUTH": "munge"}
    daemon = make_daemon("--listen", f"127.0.0.1:{port}").start(environ=settings)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("1.0 1.0\n")
    options = ["--daemon", f"http://127.0.0.1:{port}", "--munge-socket", munged.socket, "--root", str(tmp_path)]
    command = [sys.executable, "-m", "tmd_worker.health.main", *options, "--node", "n1", "--disk", "/", "--nic", "eth7"]
    refused = run_as(ALICE, *command)
    assert (refused.returncode, "is for operators, uid 54101 is none" in refused.stderr) == (1, True), refused.stderr
    assert daemon.client.get("/v1/findings")["findings"] == []
    told = run_as(0, *command)
    assert (told.returncode, told.stderr) == (1, ""), told.stderr
    found = {(each["finding"]["check"], each["finding"]["part"]) for each in daemon.client.get("/v1/findings")["findings"]}
    assert ("nic.link", "eth7") in found
    assert ("health.broken", "kernel log") in found, "the tree has no /dev/kmsg"
