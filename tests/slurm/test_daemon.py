"""A daemon with Slurm's nodes: what operators and Slurm do is seen through its interface, and Slurm's silence stops nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.rig import Daemon
from tests.slurm.clients import daemon_settings
from tests.slurm.cluster import SLURMCTLD, SlurmCluster

DEADLINE_S = 60.0


@pytest.fixture
def daemon(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Daemon]:
    settings = daemon_settings(cluster) | {"TMD_SLURM_QUERY_TIMEOUT_S": "1.0"}
    started = Daemon(tmp_path)
    try:
        yield started.start("--resource-manager", "slurm", environ=settings)
    finally:
        started.clean_up()


def until(condition: Callable[[], Any], daemon: Daemon) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, daemon.log_text()
        time.sleep(0.05)


def nodes(daemon: Daemon) -> dict[str, tuple[str, str]]:
    return {node["name"]: (node["manager_state"], node["reason"]) for node in daemon.client.get("/v1/nodes")["nodes"]}


def test_nodes_drains_and_resumes_are_slurm_s(daemon: Daemon, cluster: SlurmCluster) -> None:
    assert daemon.status()["resource_manager"] == "slurm"
    assert nodes(daemon)["n1"] == ("IDLE", "")
    daemon.client.post("/v1/nodes/n1/drain", {"reason": "bad DIMM"})
    assert cluster.states()["n1"] == "IDLE+DRAIN"
    assert nodes(daemon)["n1"] == ("IDLE+DRAIN", "bad DIMM (root)")
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=by hand")
    until(lambda: "by hand" in daemon.log_text(), daemon)
    daemon.client.post("/v1/nodes/n1/resume", {})
    assert "DRAIN" not in cluster.states()["n1"]
    assert daemon.end() == 0


def test_slurm_s_silence_is_told_and_stops_nothing(daemon: Daemon, cluster: SlurmCluster) -> None:
    until(lambda: nodes(daemon), daemon)
    cluster.stop_part(SLURMCTLD, signal.SIGKILL)
    until(lambda: "does not answer" in daemon.log_text(), daemon)
    assert daemon.client.get("/v1/nodes")["manager_error"]
    assert daemon.status()["resource_manager"] == "slurm"
    cluster.start_part(SLURMCTLD)
    until(lambda: "answers again" in daemon.log_text(), daemon)
    assert set(nodes(daemon)) == {"n1", "n2", "n3", "n4"}


def test_a_daemon_that_cannot_ask_slurm_says_why(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    with pytest.raises(AssertionError, match=r"Slurm's commands cannot be used.*bin_dir"):
        daemon.start("--resource-manager", "slurm", environ={"TMD_SLURM_BIN_DIR": "/nonexistent"})
    daemon.clean_up()
