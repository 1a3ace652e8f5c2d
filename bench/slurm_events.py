"""How soon the plugin in slurmctld tells of a drain, and what its looks at the nodes cost slurmctld.

    python -m bench.slurm_events --nodes 5000

A real slurmctld with the plugin knows that many nodes, four of which have a slurmd. A drain is timed from the start of
`scontrol` and from its end: slurmctld changes the node in between. CPU time is that of all of slurmctld, with the plugin's thread
and without, while nothing changes and while some node changes twice a second, so that looks are answered with all nodes. Needs
root, and what scripts/setup-slurm installs. Writes OUT/slurm_events.json.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil

from tests.slurm import plugins
from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.plugins import Events
from tmd.demo.outputs import FolderRefused, take

#: With a slurmd behind them.
REAL_NODES = 4
#: Drains come at any moment between two looks.
LONGEST_PAUSE_S = 0.5
#: How long CPU time is counted, and how often a node is changed meanwhile.
CPU_WINDOW_S = 5.0
CHANGE_S = 0.5


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench/slurm_events"), show_default=True
)
@click.option("--nodes", type=click.IntRange(min=REAL_NODES), default=5000, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--interval-ms", type=click.IntRange(min=10), help="TMD_EVENTS_INTERVAL_MS; by default the plugin's own.")
def main(out: Path, nodes: int, rounds: int, interval_ms: int | None) -> None:
    """Times drains until they are told, and counts slurmctld's CPU time."""
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="tmd-bench-events-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        plugins.make(f"BUILD={folder}")
        summary = _measure(folder, nodes, rounds, interval_ms)
    load = round(os.getloadavg()[0], 1)
    summary = {"nodes": nodes, "cpus": os.cpu_count(), "load": load, "rounds": rounds, "interval_ms": interval_ms} | summary
    (out / "slurm_events.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def _measure(folder: Path, nodes: int, rounds: int, interval_ms: int | None) -> dict[str, Any]:
    lines = ["SlurmdTimeout=0"]  # the others are asked for a sign of life in vain otherwise
    if nodes > REAL_NODES:
        others = f"x[1-{nodes - REAL_NODES}]"
        lines.append(f"NodeName={others} NodeAddr=127.0.0.1 Port=1 CPUs=64 RealMemory=4000 Feature=gpu,rack12 State=UNKNOWN")
    path = folder / "events.sock"
    if interval_ms is not None:
        os.environ["TMD_EVENTS_INTERVAL_MS"] = str(interval_ms)
    listener = Events(path)
    try:
        with plugins.events_go_to(path), SlurmCluster(plugins.loaded(folder, slurm_conf="\n".join(lines))) as cluster:
            listener.wait(event="resync")
            times = _drains(cluster, listener, rounds)
            cpu = {"quiet": _cpu_ms_per_s(cluster), "busy": _cpu_ms_per_s(cluster, _changing(cluster))}
            os.environ[plugins.SOCKET_VARIABLE] = ""
            cluster.restart(SLURMCTLD)
            without = {"quiet": _cpu_ms_per_s(cluster), "busy": _cpu_ms_per_s(cluster, _changing(cluster))}
            version = f"{cluster.version[0]}.{cluster.version[1]:02}"
    finally:
        listener.close()
    return {"slurm": version, **times, "cpu_ms_per_s": cpu, "cpu_ms_per_s_without": without}


def _drains(cluster: SlurmCluster, listener: Events, rounds: int) -> dict[str, dict[str, float]]:
    chance = random.Random(1)
    from_start_ms, from_end_ms = [], []
    for number in range(rounds):
        time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        asked_s = time.monotonic()
        command = cluster.popen("scontrol", "update", "nodename=n1", "state=drain", f"reason={number}")
        command.wait(10)
        changed_s = time.monotonic()
        listener.wait(node="n1", flags=["DRAIN"], reason=str(number))
        told_s = time.monotonic()
        from_start_ms.append(1000 * (told_s - asked_s))
        from_end_ms.append(1000 * max(0.0, told_s - changed_s))
        cluster.run("scontrol", "update", "nodename=n1", "state=resume")
        listener.wait(node="n1", flags=[])
    return {"from_start_of_command_ms": _spread(from_start_ms), "from_end_of_command_ms": _spread(from_end_ms)}


def _spread(times_ms: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times_ms), 1), "worst": round(max(times_ms), 1)}


def _changing(cluster: SlurmCluster) -> Callable[[], None]:
    """Changes a node that nobody asks about."""

    def change() -> None:
        cluster.run("scontrol", "update", "nodename=n2", f"comment={time.monotonic()}")

    return change


def _cpu_ms_per_s(cluster: SlurmCluster, change: Callable[[], None] = lambda: None) -> float:
    time.sleep(2.0)  # after a change slurmctld answers with all nodes for a second
    process = psutil.Process(cluster.part_pid(SLURMCTLD))
    before_s, began_s = _cpu_s(process), time.monotonic()
    while time.monotonic() - began_s < CPU_WINDOW_S:
        change()
        time.sleep(CHANGE_S)
    return round(1000 * (_cpu_s(process) - before_s) / (time.monotonic() - began_s), 1)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
