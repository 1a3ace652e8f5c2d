"""The job of the handoff benchmark: as many parameters as are wanted, in square layers, and little to compute.

wide_job.py --layers N --width W
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session


class Batches:
    """Batches that depend on rank and position alone."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, position: int, rank: int) -> torch.Tensor:
        return torch.randn(1, self._width, generator=torch.Generator().manual_seed(1_000_003 * rank + position))


def main(session: Session) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.track(model=model, optimizer=optimizer, data=Batches(args.width))
    for step in session.steps(100_000_000):
        with step:
            optimizer.zero_grad()
            model(step.batch).pow(2).mean().backward()
            optimizer.step()


if __name__ == "__main__":
    Session.run(main)
