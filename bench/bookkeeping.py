"""What a step costs beyond the script: small state copied, record sent to the buddy, vote, boundary.

    python -m bench.bookkeeping --ranks 8

Four figures, each the median over all ranks and steps, the CPU time the mean of the ranks:
- "bookkeeping": empty steps of one rank alone under the daemon, which has nobody to talk to.
- "vote": records, votes and tails of all ranks on one host, without script, state and daemon (bench.votes).
- "tmd": empty steps of all ranks under the daemon, on one node, as fast as they can. With more ranks than cores they wait for one
  another's turn and find other ranks' data in the caches.
- "plain": the same script without a daemon, which neither votes nor records.
Writes OUT/bookkeeping.json.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import click

from bench.running import run_plain, run_under_tmd
from bench.votes import vote_figures
from tmd.demo.ending import end_as_on_ctrl_c
from tmd.demo.outputs import FolderRefused, take
from tmd.demo.stack import Stack

SCRIPT = Path(__file__).with_name("empty_job.py")


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench/bookkeeping"), show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(min=500), default=3000, show_default=True)
def main(out: Path, ranks: int, steps: int) -> None:
    """Times steps in which the script does nothing."""
    end_as_on_ctrl_c()
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    folders = {who: (out / who).resolve() for who in ("bookkeeping", "tmd", "plain")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    votes = vote_figures(ranks, steps)
    with Stack(out / "stack", nodes=1) as stack:
        for who, size in (("bookkeeping", 1), ("tmd", ranks)):
            run_under_tmd(stack, size, [str(SCRIPT), "--steps", str(steps), "--out", str(folders[who])], folders[who])
    run_plain(ranks, [str(SCRIPT), "--steps", str(steps), "--out", str(folders["plain"])])
    figures = {who: _figures(folder) for who, folder in folders.items()}
    summary = {"ranks": ranks, "cpus": os.cpu_count(), "steps": steps, "vote": votes} | figures
    (out / "bookkeeping.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def _figures(folder: Path) -> dict[str, float]:
    results: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    spans = sorted(span for result in results for span in result["spans_us"])
    return {
        "step_us": round(statistics.median(spans), 1),
        "step_us_99th": round(spans[len(spans) * 99 // 100], 1),
        "cpu_us_per_rank": round(statistics.mean(result["cpu_us"] for result in results), 1),
    }


if __name__ == "__main__":
    main()
