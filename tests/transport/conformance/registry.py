"""One case on one group, and the list of all operations: each runs on any group of any backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transport.conformance.cases import UNTOUCHED, Case, laid_out

Group = Any


@dataclasses.dataclass
class Run:
    """One case on one group, as the member that this process is. Layouts are for tmd: gloo refuses many."""

    case: Case
    group: Group
    gloo: bool

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.case.reduction)

    def _place(self, values: Tensor, rows: bool) -> Tensor:
        in_columns = self.case.layout == "transposed"
        return values if self.gloo or (rows and in_columns) else laid_out(values, self.case.layout)

    def own(self, part: int = 0, elements: int | None = None, *, rows: bool = False) -> Tensor:
        """What this member passes. `rows`: not in columns, so that it can be cut along the first dimension."""
        return self._place(self.case.values(self.rank, part, self.case.elements if elements is None else elements), rows)

    def room(self, elements: int | None = None, *, rows: bool = False) -> Tensor:
        count = self.case.elements if elements is None else elements
        return self._place(torch.full((count,), UNTOUCHED).to(self.case.dtype), rows)

    def rooms(self) -> list[Tensor]:
        return [self.room() for _ in range(self.size)]

    def uneven(self) -> list[int]:
        """A size for each member, some of them 0."""
        choose = self.case.choose()
        return [choose.choice([0, 1, self.case.elements // 2, self.case.elements]) for _ in range(self.size)]

    def splits(self) -> list[list[int]]:
        """[sender][receiver] -> rows."""
        choose = self.case.choose()
        most = max(self.case.elements // self.size // 3, 2)
        return [[choose.choice([0, 1, most, choose.randint(0, most)]) for _ in range(self.size)] for _ in range(self.size)]


Operation = Callable[[Run], list[Tensor]]
#: By name: how it is called, and how gloo yields the same.
OPERATIONS: dict[str, tuple[Operation, Operation]] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = (function, function)
    return function


def on_gloo(name: str) -> Callable[[Operation], Operation]:
    def note(function: Operation) -> Operation:
        OPERATIONS[name] = (OPERATIONS[name][0], function)
        return function

    return note
