"""Many planned moves of one job under a real daemon with real agents: neither holds more at the end, nor do the ranks that stay.

TMD_MOVES sets how many (each costs the start of a node and a standby, some seconds of one core).
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.cluster import Cluster, until
from tests.e2e.losses_rig import running_agents
from tests.usage import Usage, growth

MOVES = int(os.environ.get("TMD_MOVES", "12"))
#: Of four ranks these move in turn; the others stay, and their nodes.
MOVED = (1, 2)
STAYERS = (0, 3)
#: Allocators and caches fill up first.
SETTLED_AFTER = MOVES // 4
#: What the daemon keeps of a migration and its story, in memory, for as long as the job is there.
MOVE_BYTES = 64 << 10
SLACK_BYTES = 4 << 20


def test_many_planned_moves_leave_nothing_behind(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=6) as cluster:
        job = cluster.start_job(standby=2, steps=1_000_000, pace_ms=20)
        job.wait_ready(2)
        pids, agents = job.pids(), running_agents(job)
        usage = {"daemon": Usage(cluster.stack.pid)}
        for rank in STAYERS:
            usage[f"rank {rank}"] = Usage(pids[rank])
            usage[f"agent of {rank}"] = Usage(agents[job.node_of(rank)])
        for number in range(MOVES):
            job.wait_ready(1)
            left = job.node_of(MOVED[number % len(MOVED)])
            migration_id = job.request("--rank", str(MOVED[number % len(MOVED)]))
            done = job.wait_migration(migration_id, "done")
            assert (done["steps_redone"], done["stayer_links_reopened"]) == (0, 0)
            until(lambda left=left: cluster.node(left)["manager_state"] == "IDLE", f"{left} is given back")
            cluster.reboot(left)
            if number >= SETTLED_AFTER:
                for each in usage.values():
                    each.sample()
        assert {rank: job.pids()[rank] for rank in STAYERS} == {rank: pids[rank] for rank in STAYERS}
        job.end()
    for name, held in usage.items():
        kept_bytes = MOVE_BYTES * len(held.descriptors) if name == "daemon" else 0
        assert growth(held.descriptors) < 2, (name, held.descriptors)
        assert growth(held.threads) < 2, (name, held.threads)
        assert growth(held.resident_bytes) < SLACK_BYTES + kept_bytes, (name, held.resident_bytes)
