"""Trains; tells in a folder how far it is, and stops before step 5 until it is told to go on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session

FOLDER = Path(sys.argv[1])
STEPS, WAITS_BEFORE = 40, 5
DEADLINE_S = 120.0


def batch(position: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * rank + position))


def tell(name: str) -> None:
    (FOLDER / name).write_text(str(os.getuid()))


def wait_for(name: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (FOLDER / name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"nobody says {name}")
        time.sleep(0.02)


def main(session: Session) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.track(model=model, optimizer=optimizer, data=batch)
    for step in session.steps(STEPS):
        if session.live and step.index == WAITS_BEFORE:
            tell(f"rank{session.rank}-waits")
            wait_for("go-on")
        with step:
            optimizer.zero_grad()
            model(step.batch).pow(2).mean().backward()
            optimizer.step()
        if step.committed and step.index == STEPS - 2:
            tell(f"rank{session.rank}-trained")


Session.run(main)
