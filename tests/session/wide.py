"""A training script for the tests whose state has many chunks, so that a joiner has something to draw from each of its sources.

Arguments: folder, steps. Writes digest-<rank>.txt at the end. A joiner reads nothing before two sources take part.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.handoff.meeting import MeetingChunks
from tmd_worker import Session, faults
from tmd_worker.state import receiving

WIDTH, LAYERS = 1024, 8


def batch(position: int, rank: int) -> torch.Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(100_003 * rank + position))


def main(session: Session) -> None:
    folder, total = Path(sys.argv[1]), int(sys.argv[2])
    receiving.SharedChunks = MeetingChunks  # type: ignore[misc]
    torch.manual_seed(7)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.track(model=model, optimizer=optimizer, data=batch)
    torch.manual_seed(1000 + session.rank)
    np.random.seed(session.rank)
    random.seed(session.rank)
    for step in session.steps(total):
        with step:
            optimizer.zero_grad()
            faults.point("forward")
            model(step.batch).pow(2).mean().backward()
            optimizer.step()
    (folder / f"digest-{session.rank}.txt").write_text(str(session.digest()))


if __name__ == "__main__":
    Session.run(main)
