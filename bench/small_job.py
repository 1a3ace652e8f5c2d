"""The job of the benchmarks: a small model under DDP with steps of a few milliseconds, and memory that only weighs.

small_job.py --steps N --out DIR [--resident-mib M]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session


class Batches:
    """Batches that depend on rank and position alone."""

    def __call__(self, position: int, rank: int) -> torch.Tensor:
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(1_000_003 * rank + position))


def main(session: Session) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resident-mib", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ballast = torch.ones(args.resident_mib << 20, dtype=torch.uint8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Dropout(0.1), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 8))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.08)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.track(model=wrapped, optimizer=optimizer, data=Batches())
    for step in session.steps(args.steps):
        with step:
            optimizer.zero_grad()
            wrapped(step.batch).pow(2).mean().backward()
            optimizer.step()
        if step.committed:
            with (args.out / f"commits-{os.getpid()}.jsonl").open("a") as log:  # not before: a standby must not write
                log.write(json.dumps([step.index, session.rank, time.time()]) + "\n")
    del ballast


if __name__ == "__main__":
    Session.run(main)
