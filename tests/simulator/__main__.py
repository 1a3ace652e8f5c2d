"""`python -m tests.simulator --seed N [--verbose]` replays one seed; `--seeds A:B --jobs 2` runs many and sums up.

Exit code 1 if any seed breaks a rule, or shows too little to be worth running.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.simulator.run import Outcome, run_seed

#: What every seed must at least go through.
LEAST_EVENTS, LEAST_FAULTS = 300, 3


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def _outcomes(seeds: range, bug: str, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from (run_seed(seed, bug=bug) for seed in seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(_Run(bug), seeds, chunksize=20)


class _Run:
    """Picklable."""

    def __init__(self, bug: str) -> None:
        self.bug = bug

    def __call__(self, seed: int) -> Outcome:
        return run_seed(seed, bug=self.bug)


def _run_many(seeds: range, bug: str, jobs: int, show: int) -> int:
    begin = time.monotonic()
    kinds: collections.Counter[str] = collections.Counter()
    results: collections.Counter[str] = collections.Counter()
    events, faults, broken, thin = [], [], [], []
    for outcome in _outcomes(seeds, bug, jobs):
        kinds += outcome.kinds
        results[outcome.result.split(":")[0]] += 1
        events.append(outcome.events)
        faults.append(outcome.faults)
        if not bug and (outcome.events < LEAST_EVENTS or outcome.faults < LEAST_FAULTS):
            thin.append(outcome.seed)
        if outcome.violation:
            broken.append(outcome)
            if len(broken) <= show:
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{len(events)} seeds in {seconds:.1f} s")
    print(f"{sum(events)} events, fewest {min(events)}; {sum(faults)} faults, fewest {min(faults)}")
    print("faults:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    print("jobs:", ", ".join(f"{result} {count}" for result, count in results.most_common()))
    print(f"violations: {len(broken)}" + (f", first seed {min(outcome.seed for outcome in broken)}" if broken else ""))
    if thin:
        print(f"too thin: seeds {thin[:show]} have less than {LEAST_EVENTS} events or {LEAST_FAULTS} faults")
    print(f"{len(events) - len(broken)} passed, {len(broken)} failed")
    return 1 if broken or thin else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed")
    parser.add_argument("--seeds", type=_range, metavar="A:B", help="run the seeds A to B - 1")
    parser.add_argument("--bug", default="", help="plant this bug (see bugs.py)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--show", type=int, default=20, help="violations to print")
    parser.add_argument("--verbose", action="store_true", help="print what happens")
    options = parser.parse_args()
    if options.seeds is not None:
        return _run_many(options.seeds, options.bug, options.jobs, options.show)
    if options.seed is None:
        parser.error("give --seed or --seeds")
    outcome = run_seed(options.seed, bug=options.bug, verbose=options.verbose)
    print(outcome)
    return 1 if outcome.violation else 0


if __name__ == "__main__":
    sys.exit(main())
