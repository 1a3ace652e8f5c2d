"""slurmctld under valgrind with the plugins in it: all that they do, and no memory is read or written that should not be."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.plugins import Events


@pytest.fixture
def valgrind_log(standby_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """slurmctld runs under valgrind, whose findings are in this file once it has ended."""
    valgrind, program = shutil.which("valgrind"), shutil.which("slurmctld", path=standby_cluster.env["PATH"])
    assert valgrind is not None, "these tests need valgrind: run scripts/setup-slurm"
    assert program is not None, "these tests need slurmctld: run scripts/setup-slurm"
    log, wrapper = tmp_path / "valgrind.log", tmp_path / SLURMCTLD
    options = f"--leak-check=full --show-leak-kinds=definite --num-callers=30 --fair-sched=yes --log-file={log}.%p"
    wrapper.write_text(f'#!/bin/sh\nexec {valgrind} {options} {program} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(standby_cluster, "path", [str(tmp_path), *standby_cluster.path])
    standby_cluster.restart(SLURMCTLD)
    standby_cluster.wait_for(lambda: set(standby_cluster.states().values()) == {"IDLE"}, "every node to be IDLE")
    return log


def test_valgrind_finds_nothing_in_slurmctld(standby_cluster: SlurmCluster, valgrind_log: Path, events_path: Path) -> None:
    cluster = standby_cluster
    events = Events(events_path)
    try:
        events.wait(event="resync")  # the watcher knows all nodes
        for number in range(3):
            cluster.run("scontrol", "update", "nodename=n2", "state=drain", f'reason={number} "é"')
            events.wait(node="n2", flags=["DRAIN"])
            cluster.run("scontrol", "update", "nodename=n2", "state=resume")
            events.wait(node="n2", flags=[])
        cluster.sbatch("true", "-N2", "-n4", "--standby=1", "-H")
        assert cluster.run("sbatch", "-n2", "--standby=1", "--wrap=true", check=False).returncode != 0
        lines = cluster.options.slurm_conf
        cluster.reconfigure(f"{lines}\nJobSubmitPlugins=lua")
        cluster.reconfigure(lines)
        events.wait(event="resync", lost=0)
    finally:
        events.close()
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=nobody listens")
    cluster.stop_part(SLURMCTLD)
    found = "\n".join(path.read_text() for path in valgrind_log.parent.glob("valgrind.log.*"))
    assert "HEAP SUMMARY" in found
    assert not re.findall(r"Invalid (?:read|write|free)|uninitialised|Mismatched free|Process terminating", found)
    assert "job_submit_tmd" not in found
