"""Everything that brings values from members to members; what gloo lacks is done with what it has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transport.conformance.registry import Run, on_gloo, operation


@operation
def broadcast(run: Run) -> list[Tensor]:
    tensor = run.own()
    dist.broadcast(tensor, group=run.group, group_src=run.case.root)
    return [tensor]


@operation
def all_gather(run: Run) -> list[Tensor]:
    outputs = run.rooms()
    dist.all_gather(outputs, run.own(), group=run.group)
    return outputs


@operation
def all_gather_uneven(run: Run) -> list[Tensor]:
    outputs = [run.room(size) for size in run.uneven()]
    dist.all_gather(outputs, run.own(0, run.uneven()[run.rank]), group=run.group)
    return outputs


@on_gloo("all_gather_uneven")
def _everybody_broadcasts(run: Run) -> list[Tensor]:
    outputs = [run.own(0, size) for size in run.uneven()]
    for member, output in enumerate(outputs):
        dist.broadcast(output, group=run.group, group_src=member)
    return outputs


@operation
def all_gather_single(run: Run) -> list[Tensor]:
    output = run.room(run.size * run.case.elements)
    dist.all_gather_single(output, run.own(), group=run.group)
    return [output]


@operation
def all_gather_coalesced(run: Run) -> list[Tensor]:
    outputs = [run.rooms(), [run.room(7) for _ in range(run.size)]]
    dist.all_gather_coalesced(outputs, [run.own(), run.own(1, 7)], group=run.group)
    return [tensor for tensors in outputs for tensor in tensors]


@on_gloo("all_gather_coalesced")
def _gather_one_by_one(run: Run) -> list[Tensor]:
    """gloo's own takes the size of the outer list for the inner one's."""
    outputs = [run.rooms(), [run.room(7) for _ in range(run.size)]]
    for tensors, own in zip(outputs, [run.own(), run.own(1, 7)], strict=True):
        dist.all_gather(tensors, own, group=run.group)
    return [tensor for tensors in outputs for tensor in tensors]


@operation
def gather(run: Run) -> list[Tensor]:
    outputs = run.rooms() if run.rank == run.case.root else None
    dist.gather(run.own(), outputs, group=run.group, group_dst=run.case.root)
    return outputs or []


@on_gloo("gather")
def _gather_everywhere(run: Run) -> list[Tensor]:
    """gloo's own refuses complex numbers."""
    outputs = all_gather(run)
    return outputs if run.rank == run.case.root else []


@operation
def scatter(run: Run) -> list[Tensor]:
    output = run.room()
    parts = [run.own(part) for part in range(run.size)] if run.rank == run.case.root else None
    dist.scatter(output, parts, group=run.group, group_src=run.case.root)
    return [output]


@operation
def all_to_all(run: Run) -> list[Tensor]:
    splits = run.splits()
    outputs = [run.room(splits[sender][run.rank]) for sender in range(run.size)]
    inputs = [run.own(part, rows) for part, rows in enumerate(splits[run.rank])]
    dist.all_to_all(outputs, inputs, group=run.group)
    return outputs


@on_gloo("all_to_all")
def _exchange_as_one(run: Run) -> list[Tensor]:
    """gloo's own takes parts of one size only."""
    splits = run.splits()
    taken = [splits[sender][run.rank] for sender in range(run.size)]
    output = run.room(sum(taken))
    given = torch.cat([run.own(part, rows) for part, rows in enumerate(splits[run.rank])])
    dist.all_to_all_single(output, given, taken, splits[run.rank], group=run.group)
    return list(output.split_with_sizes(taken))


@operation
def all_to_all_single(run: Run) -> list[Tensor]:
    each = run.case.elements // run.size
    output = run.room(run.size * each, rows=True)
    dist.all_to_all_single(output, run.own(0, run.size * each, rows=True), group=run.group)
    return [output]


@operation
def all_to_all_single_with_splits(run: Run) -> list[Tensor]:
    """Of rows of three elements."""
    splits = run.splits()
    taken = [splits[sender][run.rank] for sender in range(run.size)]
    given = splits[run.rank]
    output = run.room(3 * sum(taken), rows=True).view(-1, 3)
    dist.all_to_all_single(output, run.own(0, 3 * sum(given), rows=True).view(-1, 3), taken, given, group=run.group)
    return [output]


@operation
def barrier(run: Run) -> list[Tensor]:
    dist.barrier(run.group)
    return []
