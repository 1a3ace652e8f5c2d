"""The job of the bookkeeping benchmark: steps that do nothing but agree that they are done.

empty_job.py --steps N --out DIR
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tmd_worker import Session

#: The first steps pay for files, caches and other ranks that are still starting.
SKIPPED_STEPS = 100


def main(session: Session) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    session.track(model=torch.nn.Linear(8, 8))
    ends, cpu_s = [], 0.0
    for step in session.steps(args.steps):
        with step:
            session.vote()
        if step.committed:
            ends.append(time.perf_counter())
            if step.index == SKIPPED_STEPS:
                cpu_s = time.process_time()
    cpu_s = time.process_time() - cpu_s
    spans = [after - before for before, after in zip(ends[SKIPPED_STEPS:], ends[SKIPPED_STEPS + 1 :], strict=False)]
    result = {"spans_us": [1e6 * span for span in spans], "cpu_us": 1e6 * cpu_s / len(spans)}
    (args.out / f"rank{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    Session.run(main)
