"""What a run of the example left behind (losses-rankR.jsonl, final-rankR.json), and whether two runs are bit-identical."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """One finished run. `losses[rank][step]` is the loss as a hexadecimal float, so that equality means equal bits."""

    losses: dict[int, dict[int, str]]
    #: Commit times of rank 0's role, seconds since the Unix epoch, by step.
    times_s: dict[int, float]
    digests: dict[int, dict[str, str]]
    #: (rank, step) that were logged twice with different values: always an error.
    contradictions: tuple[tuple[int, int], ...]


def read_run(folder: Path, world_size: int) -> RunResult:
    """Raises ValueError naming the file if one is missing or damaged."""
    losses: dict[int, dict[int, str]] = {}
    digests: dict[int, dict[str, str]] = {}
    times: dict[int, float] = {}
    contradictions = []
    for rank in range(world_size):
        log, final = folder / f"losses-rank{rank}.jsonl", folder / f"final-rank{rank}.json"
        losses[rank] = {}
        for number, row in enumerate(_rows(log), start=1):
            try:
                step, loss, time_s = int(row["step"]), str(row["loss"]), float(row["time"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{log}:{number}: not a loss line ({error})") from None
            if losses[rank].setdefault(step, loss) != loss:
                contradictions.append((rank, step))
            if rank == 0:
                times[step] = time_s
        try:
            digests[rank] = {str(key): str(value) for key, value in json.loads(final.read_text())["digests"].items()}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{final}: rank {rank} did not finish ({error})") from None
    return RunResult(losses, times, digests, tuple(contradictions))


def _rows(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; a line cut off by a kill (without its end) is left out, anything else that is not JSON is an error."""
    try:
        text = log.read_text()
    except OSError as error:
        raise ValueError(f"{log}: {error.strerror}") from None
    rows = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        rows.append(json.loads(line))
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How a disturbed run differs from the reference; nothing differs when `identical`."""

    identical: bool
    differences: tuple[str, ...]
    #: Lines that only a lost rank had to write: the step is committed, its log line died with the process.
    lines_lost: int


def compare(reference: RunResult, run: RunResult, *, killed_ranks: set[int], kills: int) -> Comparison:
    """Compares every loss of every rank and the digests of the final state.

    A rank of a killed node may lack the line of the one step that was committed when it died, at most once a kill.
    """
    differences = [f"rank {rank} logged two values for step {step}" for rank, step in run.contradictions]
    lines_lost = 0
    for rank, expected in reference.losses.items():
        got = run.losses[rank]
        missing = sorted(expected.keys() - got.keys())
        if len(missing) <= (kills if rank in killed_ranks else 0):
            lines_lost += len(missing)
        else:
            differences.append(f"rank {rank} never committed steps {missing[:5]}")
        differences += [
            f"rank {rank} step {step}: loss {got[step]} instead of {loss}"
            for step, loss in sorted(expected.items())
            if step in got and got[step] != loss
        ][:3]
        if extra := sorted(got.keys() - expected.keys()):
            differences.append(f"rank {rank} committed steps that do not exist: {extra[:5]}")
        if run.digests[rank] != reference.digests[rank]:
            parts = [key for key, value in reference.digests[rank].items() if run.digests[rank].get(key) != value]
            differences.append(f"rank {rank}: final state differs in {', '.join(parts)}")
    return Comparison(not differences, tuple(differences), lines_lost)


def median_step_s(run: RunResult, *, skip: int = 3) -> float:
    """Median time between commits, without the first `skip` steps. Raises ValueError with fewer than two commits."""
    steps = sorted(run.times_s)[skip:]
    gaps = [run.times_s[b] - run.times_s[a] for a, b in itertools.pairwise(steps) if b == a + 1]
    if not gaps:
        raise ValueError("too few steps to tell a normal step time")
    return statistics.median(gaps)
