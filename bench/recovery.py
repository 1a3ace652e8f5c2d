"""From SIGKILL of a rank to the first new committed step: median and worst of N kills, split into the six phases.

    python -m bench.recovery --kills 30 --resident-mib 512

One job of 4 nodes with one rank each and 2 standbys runs small steps; a random rank is killed again and again, each time
once everything is whole. Writes OUT/recovery.json. Needs a few minutes, most of it for the replacements to start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tmd.core.records import PHASES
from tmd.demo.ending import end_as_on_ctrl_c
from tmd.demo.outputs import FolderRefused, take
from tmd.demo.stack import Stack

NODES, STANDBYS = 4, 2
TIMEOUT_S = 120.0


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench/recovery"), show_default=True)
@click.option("--kills", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--resident-mib", type=click.IntRange(min=0), default=512, show_default=True, help="Memory that each rank holds.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(out: Path, kills: int, resident_mib: int, seed: int) -> None:
    """Kills ranks of a running job and times how long until it commits again."""
    end_as_on_ctrl_c()
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    job_out = out / "job"
    job_out.mkdir(parents=True)
    with Stack(out / "stack", nodes=NODES + STANDBYS) as stack:
        script = Path(__file__).with_name("small_job.py").resolve()
        job_id = stack.submit(
            nnodes=NODES,
            standby=STANDBYS,
            command=[str(script), "--steps", "100000000", "--out", str(job_out.resolve()), "--resident-mib", str(resident_mib)],
            log_dir=str((out / "logs").resolve()),
        )
        chance, results = random.Random(seed), []
        for number in range(kills):
            view = _wait_until_whole(stack, job_id)
            results.append(_kill_one(stack, job_id, view, chance, job_out))
            say(f"kill {number + 1}/{kills}: first new step after {results[-1]['first_commit_ms']} ms")
    summary = _summarise(results, resident_mib)
    (out / "recovery.json").write_text(json.dumps({"summary": summary, "kills": results}, indent=2) + "\n")
    _show(summary)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _wait_until_whole(stack: Stack, job_id: str) -> dict[str, Any]:
    """Waits until the job runs, no migration is open and a standby is ready. Raises TimeoutError with the daemon's sentence."""
    deadline, view = time.monotonic() + TIMEOUT_S, None
    while time.monotonic() < deadline:
        view = stack.job(job_id)
        if view is not None and view["record"]["state"] == "failed":
            raise RuntimeError(f"the job failed: {view['record']['reason']}")
        if (
            view is not None
            and view["record"]["state"] == "running"
            and not view["migrations"]
            and view["normal_step_s"] is not None
            and any(each["phase"] == "ready" for each in view["standbys"])
        ):
            return view
        time.sleep(0.1)
    raise TimeoutError(f"not whole after {TIMEOUT_S:.0f} s: {view['sentence'] if view else 'unknown job'}")


def _kill_one(stack: Stack, job_id: str, view: dict[str, Any], chance: random.Random, job_out: Path) -> dict[str, Any]:
    victim = chance.choice(view["ranks"])
    time.sleep(chance.random() * 0.05)  # so that kills fall on all parts of a step
    killed_s = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    record = _recovery_after(stack, job_id, killed_s)
    epoch_began_s = _first_commit_after(job_out, killed_s, record)
    phases = {phase: round(record["phases_s"].get(phase, 0.0) * 1e3, 2) for phase in PHASES}
    phases["detect"] = round(phases["detect"] + max(0.0, record["started_s"] - killed_s) * 1e3, 2)
    return {
        "rank": victim["record"]["rank"],
        "first_commit_ms": round((epoch_began_s - killed_s) * 1e3, 1),
        "normal_step_ms": round((view["normal_step_s"] or 0.0) * 1e3, 1),
        "phases_ms": phases,
        "steps_redone": record["steps_redone"],
    }


def _recovery_after(stack: Stack, job_id: str, since_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for each in stack.client.get(f"/v1/migrations?job={job_id}")["migrations"]:
            record: dict[str, Any] = each["record"]
            if record["kind"] == "unplanned" and record["started_s"] >= since_s - 0.01 and record["ended_s"] is not None:
                if record["state"] != "done":
                    raise RuntimeError(f"recovery ended as {record['state']}: {record['reason']}")
                return record
        time.sleep(0.05)
    raise TimeoutError(f"no recovery has ended {TIMEOUT_S:.0f} s after the kill")


def _first_commit_after(job_out: Path, killed_s: float, record: dict[str, Any]) -> float:
    """When the joiner wrote its first committed step; the daemon may know of the commit before that line is there."""
    ranks = {int(rank) for rank in record["leavers"]}
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        first = [time_s for rank, time_s in _first_commits(job_out) if rank in ranks and time_s > killed_s]
        if first:
            return min(first)
        time.sleep(0.01)
    raise TimeoutError(f"no joiner has logged a step since the kill of rank {sorted(ranks)}")


def _first_commits(job_out: Path) -> Iterator[tuple[int, float]]:
    """(rank, time) of the first committed step of every process so far: only a joiner's is later than the kill."""
    for log in job_out.glob("commits-*.jsonl"):
        with log.open() as lines:
            line = lines.readline()
        if line.endswith("\n"):
            _, rank, time_s = json.loads(line)
            yield rank, time_s


def _summarise(results: list[dict[str, Any]], resident_mib: int) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return {"median": round(statistics.median(values), 1), "worst": round(max(values), 1)}

    return {
        "kills": len(results),
        "resident_mib": resident_mib,
        "cpus": os.cpu_count(),
        "normal_step_ms": spread([each["normal_step_ms"] for each in results]),
        "first_commit_ms": spread([each["first_commit_ms"] for each in results]),
        "phases_ms": {phase: spread([each["phases_ms"][phase] for each in results]) for phase in PHASES},
    }


def _show(summary: dict[str, Any]) -> None:
    table = Table(title=f"SIGKILL of a rank with {summary['resident_mib']} MiB to the first new committed step, ms")
    table.add_column("")
    for column in (*PHASES, "in all", "normal step"):
        table.add_column(column, justify="right")
    for which in ("median", "worst"):
        cells = [summary["phases_ms"][phase][which] for phase in PHASES]
        table.add_row(
            which, *(str(cell) for cell in (*cells, summary["first_commit_ms"][which], summary["normal_step_ms"][which]))
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
