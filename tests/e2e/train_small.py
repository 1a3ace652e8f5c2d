"""The training job of these tests: steps of a few milliseconds, and all that must come through a migration bit by bit.

    train_small.py --out DIR --steps N [--forget NAME]

Every committed step is a line of DIR/steps-rankR.jsonl: its loss and, of every fifth step, digests of the whole state. DIR/pace,
if there, holds how many milliseconds a step lasts at least. In the environment E2E_MODEL=wider or =extra builds another model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session

FEATURES = 24
#: Digests cost as much as the step itself.
DIGEST_EVERY = 5


class Batches:
    """Batches that depend on rank and position alone."""

    def __call__(self, position: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100_003 * rank + position)
        return torch.randn(8, FEATURES, generator=generator), torch.randn(8, 4, generator=generator)


class Net(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        width = 56 if variant == "wider" else 48
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, 48),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(48, 4),
        )
        if variant == "extra":
            self.register_buffer("surplus", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def main(session: Session) -> None:
    args = parse()
    torch.manual_seed(7)
    model = DistributedDataParallel(Net(os.environ.get("E2E_MODEL", "")), bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    tracked = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": Batches()}
    session.track(**{name: part for name, part in tracked.items() if name != args.forget})
    torch.manual_seed(1000 + session.rank)
    np.random.seed(session.rank)
    random.seed(session.rank)
    for step in session.steps(args.steps):
        began_s = time.monotonic()
        with step:
            optimizer.zero_grad()
            x, y = step.batch
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        if step.committed:
            note(args.out, session, step.index, loss)
        time.sleep(max(0.0, began_s + pace_s(args.out) - time.monotonic()))


def note(folder: Path, session: Session, step: int, loss: Tensor) -> None:
    line = {"step": step, "loss": loss.item().hex(), "pid": os.getpid()}
    if (step + 1) % DIGEST_EVERY == 0:  # the last step of every job that ends, too: all have a multiple of it
        line |= session.digest()
    with (folder / f"steps-rank{session.rank}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def pace_s(folder: Path) -> float:
    try:
        return float((folder / "pace").read_text() or 0) / 1000
    except FileNotFoundError:
        return 0.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--forget", default="", help="leave this out of session.track")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Session.run(main)
