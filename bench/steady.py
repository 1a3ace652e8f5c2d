"""Steps in which nothing fails: the example under tmd against the same script as plain PyTorch with gloo, side by side.

    python -m bench.steady --rounds 5 --ranks 4

Each round runs both, in turn first. A round's figure is the median of its steps; the ratio is gloo's median of rounds to tmd's
(above 1: tmd is faster). Writes OUT/steady.json. Also checks that both compute the same losses to the precision that another
order of summation leaves.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path

import click

from bench.running import run_plain, run_under_tmd
from tmd.demo.ending import end_as_on_ctrl_c
from tmd.demo.outputs import FolderRefused, take
from tmd.demo.stack import Stack

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "gpt" / "train.py"
#: The first steps of a run pay for allocations, bucket rebuilding and files.
SKIPPED_STEPS = 5


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/bench/steady"), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=SKIPPED_STEPS + 2), default=40, show_default=True)
def main(out: Path, rounds: int, ranks: int, steps: int) -> None:
    """Times the example's steps under tmd and under plain gloo DDP."""
    end_as_on_ctrl_c()
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    step_ms: dict[str, list[float]] = {"tmd": [], "gloo": []}
    with Stack(out / "stack", nodes=1) as stack:
        for number in range(rounds):
            for who in ("tmd", "gloo") if number % 2 == 0 else ("gloo", "tmd"):
                folder = (out / f"{who}{number}").resolve()
                if who == "tmd":
                    run_under_tmd(stack, ranks, _arguments(steps, folder), folder)
                else:
                    run_plain(ranks, _arguments(steps, folder))
                step_ms[who].append(_median_step_ms(folder, ranks))
                print(f"round {number + 1}/{rounds}, {who}: {step_ms[who][-1]:.1f} ms a step", file=sys.stderr, flush=True)
    difference = _largest_difference(out / "tmd0", out / "gloo0")
    medians = {who: round(statistics.median(values), 2) for who, values in step_ms.items()}
    summary = {
        "ranks": ranks,
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "step_ms": medians,
        "ratio": round(medians["gloo"] / medians["tmd"], 3),
        "rounds_ms": {who: [round(value, 2) for value in values] for who, values in step_ms.items()},
        "largest_relative_loss_difference": difference,
    }
    (out / "steady.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def _arguments(steps: int, folder: Path) -> list[str]:
    return [str(SCRIPT), "--steps", str(steps), "--out", str(folder)]


def _median_step_ms(folder: Path, ranks: int) -> float:
    """Over all ranks, from the end of one committed step to the end of the next."""
    spans = []
    for rank in range(ranks):
        times = [line["time"] for line in _lines(folder, rank)][SKIPPED_STEPS:]
        spans += [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(spans) * 1e3


def _lines(folder: Path, rank: int) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"losses-rank{rank}.jsonl").read_text().splitlines()]


def _largest_difference(first: Path, second: Path) -> float:
    losses = [[float.fromhex(str(line["loss"])) for line in _lines(folder, 0)] for folder in (first, second)]
    largest = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    if not math.isfinite(largest) or largest > 1e-2:
        raise click.ClickException(f"the two runs do not compute the same: their losses differ by {largest:.1%}")
    return largest


if __name__ == "__main__":
    main()
