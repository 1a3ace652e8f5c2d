"""Collectives on tmd's own links."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tmd_worker.transport import collectives, rooted
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.link import Held, Link
from tmd_worker.transport.tensors import Reduction, flat, put_back, size_bytes


class DeltaCollectives:
    """`open_direct` opens links to these members, by group rank, as far as that has not been done."""

    def __init__(self, table: LinkTable, open_direct: Callable[[frozenset[int]], Mapping[int, Link]]) -> None:
        self._table = table
        self._open_direct = open_direct

    def barrier(self) -> None:
        collectives.barrier(self._table)

    def allreduce(self, tensor: Tensor, kind: Reduction) -> None:
        collectives.allreduce(self._table, tensor, kind)

    def reduce(self, tensor: Tensor, kind: Reduction, root: int) -> None:
        total = flat(tensor)
        rooted.reduce(self._table, self._direct, total, kind, root)
        if root == self._table.rank:
            put_back(total, tensor)

    def reduce_scatter(self, output: Tensor, blocks: Sequence[Tensor], kind: Reduction) -> None:
        copies = [block.detach().clone(memory_format=torch.contiguous_format).view(-1) for block in blocks]
        collectives.reduce_scatter(self._table, output, copies, kind)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        rooted.broadcast(self._table, tensor, root)

    def allgather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        collectives.allgather(self._table, outputs, own)

    def gather(self, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
        rooted.gather(self._table, self._direct, blocks, own, root)

    def scatter(self, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
        rooted.scatter(self._table, self._direct, output, blocks, root)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        targets = [flat(output) for output in outputs]
        outgoing = _apart([flat(part) for part in inputs], targets)
        with self._direct(frozenset(range(self._table.size)) - {self._table.rank}) as links:
            collectives.alltoall(self._table, links, outgoing, targets)
        for target, output in zip(targets, outputs, strict=True):
            put_back(target, output)

    def _direct(self, members: frozenset[int]) -> Held:
        return Held(self._open_direct(members))


def _apart(parts: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """The parts; copies of those that lie in memory that is written before they are sent, as in an all-to-all in place."""
    taken = sorted((target.data_ptr(), target.data_ptr() + size_bytes(target)) for target in targets if target.numel())

    def is_taken(part: Tensor) -> bool:
        last = bisect.bisect_left(taken, (part.data_ptr() + size_bytes(part),)) - 1
        return last >= 0 and taken[last][1] > part.data_ptr()

    return [part.clone() if is_taken(part) else part for part in parts]
