"""A training script for the tests that writes down which samples each rank has seen, for every kind of data that can be tracked.

Arguments: folder, steps, the kind of data. Writes samples-<rank>-<pid>.jsonl: a row for each committed step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.session.training import wait_for
from tmd_worker import Session, faults

SIZE = 60
BATCH = 2


class Numbered(Dataset[torch.Tensor]):
    """Samples are (index, process that made it, augmentation)."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Streamed(IterableDataset[torch.Tensor]):
    """Every rank's share, split among the workers of its loader."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.set_role(rank, world_size)

    def set_role(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(index) for index in range(self.rank + worker * self.world_size, SIZE, self.world_size * workers))


class Positioned:
    """An object that knows its own position."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.set_role(rank, world_size)
        self.position = 0

    def set_role(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < SIZE // self.world_size // BATCH:
            start = self.position * BATCH * self.world_size + self.rank
            self.position += 1
            yield torch.stack([sample(start + i * self.world_size) for i in range(BATCH)])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def sample(index: int) -> torch.Tensor:
    return torch.tensor([index, os.getpid(), torch.rand(1).item()], dtype=torch.float64)


def loader(rank: int, world_size: int, **options: Any) -> DataLoader[torch.Tensor]:
    sampler = DistributedSampler(Numbered(), num_replicas=world_size, rank=rank, shuffle=True, seed=3)
    return DataLoader(Numbered(), batch_size=BATCH, sampler=sampler, **options)


def stateful_loader(rank: int, world_size: int, **options: Any) -> StatefulDataLoader[torch.Tensor]:
    sampler = StatefulDistributedSampler(Numbered(), num_replicas=world_size, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(Numbered(), batch_size=BATCH, sampler=sampler, **options)


def by_position(position: int, rank: int, world_size: int) -> torch.Tensor:
    start = position * BATCH * world_size + rank
    return torch.stack([sample((start + i * world_size) % SIZE) for i in range(BATCH)])


#: By name: makes the data for a rank.
KINDS: dict[str, Callable[[int, int], Any]] = {
    "loader": loader,
    "loader, workers": lambda r, w: loader(r, w, num_workers=2),
    "loader, persistent workers": lambda r, w: loader(r, w, num_workers=2, persistent_workers=True),
    "stateful loader": stateful_loader,
    "stateful loader, workers": lambda r, w: stateful_loader(r, w, num_workers=2),
    "stream": lambda r, w: DataLoader(Streamed(r, w), batch_size=BATCH),
    "stream, workers": lambda r, w: DataLoader(Streamed(r, w), batch_size=BATCH, num_workers=2),
    "object": Positioned,
    "function": lambda r, w: by_position,
    "iterator": lambda r, w: iter([torch.ones(BATCH, 3, dtype=torch.float64)] * 1000),
}


def train(session: Session, folder: Path, total: int, kind: str) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.track(model=model, optimizer=optimizer, data=KINDS[kind](session.rank, session.world_size))
    torch.manual_seed(1000 + session.rank)
    for step in session.steps(total):
        with step:
            if not step.shadow and step.index == int(os.environ["TMD_TEST_GATE"]):
                wait_for(folder / "go")
            optimizer.zero_grad()
            batch = step.batch
            faults.point("forward")
            model(batch[:, :1].float() / SIZE).pow(2).mean().backward()
            faults.point("backward")
            optimizer.step()
        if step.committed:
            write_samples(folder, session.rank, step.index, batch)


def write_samples(folder: Path, rank: int, step: int, batch: torch.Tensor) -> None:
    row = {
        "rank": rank,
        "step": step,
        "samples": [int(index) for index in batch[:, 0]],
        "noise": [value.hex() for value in batch[:, 2].tolist()],
        "makers": sorted({int(pid) for pid in batch[:, 1]}),
    }
    with (folder / f"samples-{rank}-{os.getpid()}.jsonl").open("a") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, steps, data = sys.argv[1:]
    Session.run(lambda session: train(session, Path(directory), int(steps), data))
