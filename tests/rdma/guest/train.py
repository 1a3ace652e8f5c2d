"""The job that is moved: a state of several chunks, and steps for which an emulated processor needs a fraction of a second.

    train.py --out DIR --steps N

Every committed step is a line of DIR/steps-rankR.jsonl: its loss and, of every fifth step, digests of the whole state. DIR/limit,
if there, holds which step is not to be begun yet. Batches and the table come from integers alone: the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session

ROWS, FEATURES, WIDTH, BATCH = 8192, 256, 1024, 4
DIGEST_EVERY = 5
LOOK_S = 0.05


class Net(nn.Module):
    """4 MB of parameters and optimizer state, and a table of 8 MB that moves along and costs no step anything."""

    def __init__(self) -> None:
        super().__init__()
        table = (torch.arange(ROWS * FEATURES) * 7919 % 1009).float().div(1009).view(ROWS, FEATURES)
        self.table = nn.Parameter(table, requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, FEATURES // 4))

    def forward(self, rows: Tensor) -> Tensor:
        y: Tensor = self.layers(self.table[rows])
        return y


def batch(position: int, rank: int) -> Tensor:
    return torch.arange(BATCH) * 977 + position * 31 + rank * 4099


def main(session: Session) -> None:
    args = parse()
    torch.manual_seed(7)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=3e-3)
    session.track(model=model, optimizer=optimizer, data=batch)
    torch.manual_seed(1000 + session.rank)
    np.random.seed(session.rank)
    random.seed(session.rank)
    for step in session.steps(args.steps):
        while session.live and step.index >= limit(args.out):
            time.sleep(LOOK_S)
        with step:
            optimizer.zero_grad()
            rows = step.batch % ROWS
            loss = (model(rows) - model.module.table[rows, : FEATURES // 4]).pow(2).mean()
            loss.backward()
            optimizer.step()
        if step.committed:
            note(args.out, session, step.index, loss)


def note(folder: Path, session: Session, step: int, loss: Tensor) -> None:
    line = {"step": step, "loss": loss.item().hex()}
    if (step + 1) % DIGEST_EVERY == 0:
        line |= session.digest()
    with (folder / f"steps-rank{session.rank}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def limit(folder: Path) -> float:
    try:
        return float((folder / "limit").read_text())
    except FileNotFoundError:
        return float("inf")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Session.run(main)
