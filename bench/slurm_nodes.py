"""What it costs to know the state of every node of a Slurm cluster, and how soon a drain is seen.

    python -m bench.slurm_nodes --nodes 5000

A real slurmctld knows that many nodes, four of which have a slurmd. Each read is tmd's own (tmd.nodes.slurm), with everything
that becomes of the answer. CPU time is counted where it is spent: in this process, in the commands that it starts, in slurmctld
(less what that takes when nobody asks). Needs root, and what scripts/setup-slurm installs. Writes OUT/slurm_nodes.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import psutil

from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.files import Options
from tmd.demo.outputs import FolderRefused, take
from tmd.nodes.slurm.choice import make_client
from tmd.nodes.slurm.client import SlurmClient
from tmd.nodes.slurm.nodes import SlurmNodes
from tmd.nodes.slurm.settings import SlurmSettings

DEADLINE_S = 60.0
#: The event loop is looked at this often: rarely enough to cost next to nothing.
LOOK_S = 0.01
#: With a slurmd behind them.
REAL_NODES = 4


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench/slurm_nodes"), show_default=True)
@click.option("--nodes", type=click.IntRange(min=REAL_NODES + 1), default=5000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--client", type=click.Choice(["commands", "pyslurm"]), default="commands", show_default=True)
def main(out: Path, nodes: int, rounds: int, client: str) -> None:
    """Times reads of all nodes, and drains until they are seen."""
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    others = nodes - REAL_NODES
    lines = (
        f"NodeName=x[1-{others}] NodeAddr=127.0.0.1 Port=1 CPUs=64 RealMemory=4000 Feature=gpu,rack12 State=UNKNOWN",
        # These are asked for a sign of life in vain otherwise, which is not what is measured.
        "SlurmdTimeout=0",
    )
    with SlurmCluster(Options(nodes=REAL_NODES, slurm_conf="\n".join(lines))) as cluster:
        settings = SlurmSettings(client=client, conf=str(cluster.places.slurm_conf), bin_dir=cluster.bin_dir)  # type: ignore[arg-type]
        summary = asyncio.run(_measure(cluster, settings, rounds))
    summary = {"nodes": nodes, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "rounds": rounds} | summary
    (out / "slurm_nodes.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


async def _measure(cluster: SlurmCluster, settings: SlurmSettings, rounds: int) -> dict[str, Any]:
    client = await make_client(settings)
    slurmctld = psutil.Process(cluster.part_pid(SLURMCTLD))
    reads: dict[str, Callable[[], Awaitable[object]]] = {
        "all nodes": client.nodes,
        "one node": lambda: client.node("n1"),
        "all jobs": client.jobs,
    }
    try:
        costs = {name: await _cost(read, rounds, slurmctld) for name, read in reads.items()}
        seen_ms = await _drains(cluster, settings, client, rounds)
    finally:
        await client.close()
    version = f"{cluster.version[0]}.{cluster.version[1]:02}"
    return {"client": client.description, "slurm": version, "reads": costs, "drain_to_event_ms": seen_ms}


async def _cost(read: Callable[[], Awaitable[object]], rounds: int, slurmctld: psutil.Process) -> dict[str, float]:
    """Milliseconds for one read."""
    await read()
    stalls = _Stalls()
    idle_share = await _idle_share(slurmctld)
    before_ctld, before_self, before_commands = _cpu_s(slurmctld), time.process_time(), _children_cpu_s()
    began_s = time.monotonic()
    walls_ms = []
    async with stalls:
        for _ in range(rounds):
            asked_s = time.monotonic()
            await read()
            walls_ms.append(1000 * (time.monotonic() - asked_s))
    lasted_s = time.monotonic() - began_s
    return {
        "wall_ms": round(statistics.median(walls_ms), 1),
        "wall_ms_worst": round(max(walls_ms), 1),
        "cpu_ms_tmd": round(1000 * (time.process_time() - before_self) / rounds, 1),
        "cpu_ms_commands": round(1000 * (_children_cpu_s() - before_commands) / rounds, 1),
        "cpu_ms_slurmctld": round(1000 * max(0.0, _cpu_s(slurmctld) - before_ctld - idle_share * lasted_s) / rounds, 1),
        "event_loop_stalled_ms_worst": round(stalls.worst_ms, 1),
    }


class _Stalls:
    """How long the event loop did not turn, at worst, while this is entered."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._look())

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            self.worst_ms = max(self.worst_ms, 1000 * (time.monotonic() - slept_s - LOOK_S))


async def _drains(cluster: SlurmCluster, settings: SlurmSettings, client: SlurmClient, rounds: int) -> dict[str, float]:
    """From the return of scontrol to the event, by polling alone."""
    nodes = SlurmNodes(settings, client)
    events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def listen() -> None:
        async for event in nodes.watch():
            if event.node == "n1":
                events.put_nowait((event.state, event.reason))

    task = asyncio.create_task(listen())
    times_ms = []
    chance = random.Random(1)
    try:
        await asyncio.wait_for(events.get(), DEADLINE_S)
        for number in range(rounds):
            # At any moment between two questions: the last event came just after one.
            await asyncio.sleep(chance.uniform(0, settings.poll_max_s))
            await asyncio.to_thread(cluster.run, "scontrol", "update", "nodename=n1", "state=drain", f"reason={number}")
            changed_s = time.monotonic()
            await asyncio.wait_for(events.get(), DEADLINE_S)
            times_ms.append(1000 * (time.monotonic() - changed_s))
            await asyncio.to_thread(cluster.run, "scontrol", "update", "nodename=n1", "state=resume")
            await asyncio.wait_for(events.get(), DEADLINE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return {"median": round(statistics.median(times_ms), 1), "worst": round(max(times_ms), 1)}


async def _idle_share(slurmctld: psutil.Process) -> float:
    """CPU seconds a second while nobody asks."""
    before_s, began_s = _cpu_s(slurmctld), time.monotonic()
    await asyncio.sleep(2.0)
    return (_cpu_s(slurmctld) - before_s) / (time.monotonic() - began_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
