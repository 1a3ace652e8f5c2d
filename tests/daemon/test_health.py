"""Health reports to a real daemon: from a node's own check to the drained node, and who may report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.rig import ROOT, Agent, Daemon
from tests.daemon.test_agents import free_port
from tmd.cli.client import ClientError

DEADLINE_S = 30.0
XID = "3,1,99000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
MakeAgent = Callable[..., Agent]


class Node:
    """A compute node as its files show it, on which tmd-health is run as slurmd would."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.root = folder / name
        for each in ("dev", "proc", "tmp"):
            (self.root / each).mkdir(parents=True)
        (self.root / "proc/uptime").write_text("100.0 1.0\n")
        (self.root / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\n")
        self.name = name
        self.says("")
        options_file = folder / f"{name}.options"
        options_file.write_text("# as in /etc/tmd/health.options\n" + "\n".join([f"--root {self.root}", *options]))
        self._environment = {**os.environ, "SLURMD_NODENAME": name, "TMD_HEALTH_OPTIONS": str(options_file)}
        ignored = [word for check in ("disk.full", "site.nhc", "gpu.dcgm") for word in ("--ignore", check)]
        self._of_this_machine = ["--site-checks", str(folder / "none"), *ignored]

    def says(self, kernel_log: str) -> None:
        (self.root / "dev/kmsg").write_text(kernel_log)

    def check(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tmd_worker.health.main", *self._of_this_machine]
        path = os.pathsep.join((str(ROOT), str(ROOT / "worker")))
        return subprocess.run(command, env={**self._environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


def state_of(daemon: Daemon, node: str) -> dict[str, Any]:
    return next(each for each in daemon.client.get("/v1/nodes")["nodes"] if each["name"] == node)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return value


def story(daemon: Daemon, node: str) -> list[str]:
    events = daemon.client.get(f"/v1/story/{node}")["events"]
    return [event["text"] for event in events if event["kind"] == "health"]


async def test_a_gpu_that_fell_off_the_bus_drains_its_node(daemon: Daemon, make_agent: MakeAgent, tmp_path: Path) -> None:
    """
    1. The node is well: nothing is printed, nothing stands.
    2. Its kernel tells of a lost GPU: the check exits with 1, the node is drained with the reason, which is what moves ranks.
    3. An operator resumes it although the finding stands: it stays in use.
    4. The log has told of it for long enough: the finding is gone.
    """
    await make_agent("j1", "n1").connect(daemon)
    node = Node(tmp_path, "n1", f"--daemon unix:{daemon.socket}")
    well = node.check()
    assert (well.returncode, well.stdout, well.stderr) == (0, "", "")
    node.says(XID)
    unwell = node.check()
    assert (unwell.returncode, unwell.stdout.split(":")[0]) == (1, "gpu.xid 0000"), unwell.stdout
    drained = wait_for(lambda: (node := state_of(daemon, "n1"))["state"] in ("draining", "drained") and node, "a drain")
    assert drained["reason"].startswith("tmd-health: gpu.xid 0000:3b:00 fatal: NVRM: Xid (PCI:0000:3b:00): 79")
    (view,) = daemon.client.get("/v1/findings")["findings"]
    wait_for(lambda: daemon.client.get("/v1/findings")["findings"][0]["acted"], "the drain is noted")
    assert (view["node"], view["action"], view["confirmed"]) == ("n1", "migrate", True)
    daemon.client.post("/v1/nodes/n1/resume")
    assert node.check().returncode == 1
    assert state_of(daemon, "n1")["state"] == "up"
    node.says("")
    assert node.check().returncode == 0
    assert daemon.client.get("/v1/findings")["findings"] == []
    assert [text.split(":")[0].split(" 0000")[0] for text in story(daemon, "n1")] == [
        "gpu.xid",
        "counts, the node is to be drained, its ranks move",
        "n1 is drained",
        "no more",
    ]


async def test_an_error_waits_until_no_ranks_train_there(daemon: Daemon, make_agent: MakeAgent) -> None:
    training = await make_agent("j1", "n1", nnodes=1).connect(daemon)
    await make_agent("j1", "n2", nnodes=1).connect(daemon)
    assert (await training.work())[0].rank == 0
    finding = {"check": "disk.io", "severity": "error", "reason": "bad", "part": "sda"}
    body = {"checked": ["disk.io"], "findings": [finding]}
    for name in ("n1", "n2"):
        for _ in range(2):
            daemon.client.post(f"/v1/nodes/{name}/findings", body)
    wait_for(lambda: state_of(daemon, "n2")["reason"], "the standby's node is drained")
    assert state_of(daemon, "n1")["state"] == "up"
    daemon.client.post("/v1/jobs/j1/cancel")
    wait_for(
        lambda: state_of(daemon, "n1")["reason"].startswith("tmd-health: disk.io sda error"), "no ranks train there any more"
    )


def test_over_tcp_without_munge_the_reporters_token_counts(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    port = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{port}").start(environ={"TMD_TCP_AUTH": "token"})
    token = tmp_path / "token"
    token.write_text(daemon.client.post("/v1/findings/token")["token"])
    node = Node(tmp_path, "n1", f"--daemon http://127.0.0.1:{port}", f"--token-file {token}")
    node.says(XID)
    told = node.check()
    assert (told.returncode, told.stderr) == (1, "")
    assert [each["node"] for each in daemon.client.get("/v1/findings")["findings"]] == ["n1"]
    for wrong in ("health.0", daemon.client.post("/v1/jobs/j1/token")["token"]):
        token.write_text(wrong)
        refused = node.check()
        assert (refused.returncode, "tmctl health token" in refused.stderr) == (1, True), refused.stderr


def test_a_daemon_that_is_away_makes_no_node_unwell(tmp_path: Path) -> None:
    node = Node(tmp_path, "n1", f"--daemon unix:{tmp_path}/tmd.sock")
    well = node.check()
    assert (well.returncode, "not reported: no daemon at" in well.stderr) == (0, True)


def test_what_is_no_report_is_refused(shared_daemon: Daemon) -> None:
    finding = {"check": "a.b", "severity": "fatal", "reason": "r"}
    for wrong in (
        {},
        {"checked": ["a.b"], "findings": [{**finding, "severity": "bad"}]},
        {"checked": ["no dot"]},
        {"checked": [], "findings": [{**finding, "reason": "x" * 501}]},
        {"checked": [], "findings": [finding] * 257},
        {"checked": [], "more": 1},
    ):
        with pytest.raises(ClientError) as refused:
            shared_daemon.client.post("/v1/nodes/n1/findings", wrong)
        assert refused.value.status == 400, wrong
    with pytest.raises(ClientError, match="node"):
        shared_daemon.client.post("/v1/nodes/n%201/findings", {"checked": []})


def test_options_that_cannot_be_understood_end_with_2(tmp_path: Path) -> None:
    for wrong in ("--since-s soon", "--explode", "'open"):
        done = Node(tmp_path / wrong.strip("'"), "n1", wrong).check()
        assert (done.returncode, bool(done.stderr)) == (2, True)


def test_tmctl_shows_findings(daemon: Daemon) -> None:
    body = {"checked": ["disk.io"], "findings": [{"check": "disk.io", "severity": "warning", "reason": "slow", "part": "sda"}]}
    daemon.client.post("/v1/nodes/n7/findings", body)
    command = [sys.executable, "-m", "tmd.cli.main", "--socket", str(daemon.socket), "health", "show"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    header, row = shown.stdout.splitlines()
    assert header.split()[:4] == ["node", "check", "part", "severity"]
    assert row.split()[:4] == ["n7", "disk.io", "sda", "warning"]
    assert "not confirmed" in row
