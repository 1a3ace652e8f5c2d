"""A node's own check finds a broken GPU: its rank moves before anything is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.cluster import Cluster, until

XID = "3,1,99000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


def test_a_finding_moves_the_ranks_of_its_node(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.start_job(standby=1, steps=100_000)
    try:
        job.wait_ready(1)
        stayer = job.pids()[0]
        root = tmp_path / "root"
        for name, content in {"dev/kmsg": XID, "proc/uptime": "100.0 1.0"}.items():
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(content)
        node = job.node_of(1)
        command = [sys.executable, "-m", "tmd_worker.health.main", "--root", str(root), "--disk", "/"]
        environment = {**os.environ, "SLURMD_NODENAME": node, "TMD_DAEMON": f"unix:{cluster.stack.socket}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, ""), done.stderr
        record = job.wait_measured(until(job.migrations, "the finding makes a migration")[0]["migration_id"])
        assert (record["kind"], record["state"], record["from_nodes"]) == ("planned", "done", [node])
        assert (record["steps_redone"], record["stayer_links_reopened"]) == (0, 0)
        assert job.pids()[0] == stayer
        freed = until(lambda: (seen := cluster.node(node))["manager_state"] == "IDLE+DRAIN" and seen, "the node is given back")
        assert freed["reason"].startswith("tmd-health: gpu.xid 0000:3b:00 fatal")
    finally:
        job.end()
        cluster.tidy()
