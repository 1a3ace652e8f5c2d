"""Real text that is on every machine: the sources of Python's standard library, cut into batches.

Contract of Batches: which bytes a rank sees at which step depends on nothing but seed, rank, world size and step, so a rank
that takes over a role goes on exactly where the one before it stood.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Enough for the demo to see every byte at most once.
LIMIT_BYTES = 4 << 20


def standard_library(limit_bytes: int = LIMIT_BYTES) -> Tensor:
    """The modules of the standard library, in order of their names, as one tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Batches:
    """An endless iterator over (bytes, following bytes) for one rank. In each epoch every window of the text is in exactly
    one batch of one rank; those that do not fill a round of batches for all ranks wait for the next epoch's order."""

    def __init__(self, text: Tensor, *, batch: int, length: int, seed: int, rank: int, world_size: int) -> None:
        """Raises ValueError if the text is too short for one batch for each rank."""
        self._text = text
        self._batch = batch
        self._length = length
        self._seed = seed
        self._windows = (len(text) - 1) // length
        #: The pass over the text, and the rounds of batches taken in it.
        self.epoch = 0
        self._round = 0
        self._order = self._shuffle()
        self.set_role(rank, world_size)

    def set_role(self, rank: int, world_size: int) -> None:
        """From here on the batches are those of this rank."""
        self._rank = rank
        self._world_size = world_size
        if self._windows < self._batch * world_size:
            raise ValueError(f"{len(self._text)} bytes are too few for {world_size} batches of {self._batch} × {self._length}")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if (self._round + 1) * self._batch * self._world_size > self._windows:
            self.epoch, self._round = self.epoch + 1, 0
            self._order = self._shuffle()
        first = (self._round * self._world_size + self._rank) * self._batch
        self._round += 1
        starts = self._order[first : first + self._batch] * self._length
        places = starts[:, None] + torch.arange(self._length)
        return self._text[places].long(), self._text[places + 1].long()

    def _shuffle(self) -> Tensor:
        """The order of the windows in this epoch; the global generator is left alone."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(self._windows, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._round = int(state["epoch"]), int(state["round"])
        self._order = self._shuffle()
