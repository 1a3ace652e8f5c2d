"""Everything that combines values; what gloo lacks is done with what it has."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transport.conformance.registry import Run, on_gloo, operation


@operation
def all_reduce(run: Run) -> list[Tensor]:
    tensor = run.own()
    dist.all_reduce(tensor, run.op, group=run.group)
    return [tensor]


@operation
def all_reduce_coalesced(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7), run.own(2, 0)]
    dist.all_reduce_coalesced(tensors, run.op, group=run.group)
    return tensors


@on_gloo("all_reduce_coalesced")
def _one_by_one(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7), run.own(2, 0)]
    for tensor in tensors:
        dist.all_reduce(tensor, run.op, group=run.group)
    return tensors


@operation
def coalescing_manager(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    with dist._coalescing_manager(run.group, async_ops=True) as works:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor, run.op, group=run.group)
    works.wait()
    return tensors


@operation
def coalescing_manager_of_a_device(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    with dist._coalescing_manager(run.group, torch.device("cpu"), async_ops=True) as works:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.broadcast(tensor, group=run.group, group_src=run.case.root, async_op=True)
    works.wait()
    return tensors


@on_gloo("coalescing_manager_of_a_device")
def _broadcasts(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    for tensor in tensors:
        dist.broadcast(tensor, group=run.group, group_src=run.case.root)
    return tensors


@operation
def reduce(run: Run) -> list[Tensor]:
    """Only the root's tensor is defined."""
    tensor = run.own()
    dist.reduce(tensor, op=run.op, group=run.group, group_dst=run.case.root)
    return [tensor] if run.rank == run.case.root else []


@on_gloo("reduce")
def _reduce_all(run: Run) -> list[Tensor]:
    """gloo's reduce leaves out the division of AVG."""
    total = all_reduce(run)
    return total if run.rank == run.case.root else []


@operation
def reduce_scatter(run: Run) -> list[Tensor]:
    output = run.room()
    dist.reduce_scatter(output, [run.own(part) for part in range(run.size)], run.op, group=run.group)
    return [output]


@operation
def reduce_scatter_uneven(run: Run) -> list[Tensor]:
    sizes = run.uneven()
    output = run.room(sizes[run.rank])
    dist.reduce_scatter(output, [run.own(part, size) for part, size in enumerate(sizes)], run.op, group=run.group)
    return [output]


@operation
def reduce_scatter_single(run: Run) -> list[Tensor]:
    output = run.room()
    dist.reduce_scatter_single(output, run.own(0, run.size * run.case.elements), run.op, group=run.group)
    return [output]


@on_gloo("reduce_scatter")
def _reduce_parts(run: Run) -> list[Tensor]:
    return _reduced_parts(run, [run.own(part) for part in range(run.size)])


@on_gloo("reduce_scatter_uneven")
def _reduce_uneven_parts(run: Run) -> list[Tensor]:
    return _reduced_parts(run, [run.own(part, size) for part, size in enumerate(run.uneven())])


@on_gloo("reduce_scatter_single")
def _reduce_whole(run: Run) -> list[Tensor]:
    return _reduced_parts(run, list(run.own(0, run.size * run.case.elements).view(run.size, -1).unbind(0)))


def _reduced_parts(run: Run, parts: list[Tensor]) -> list[Tensor]:
    """gloo's reduce-scatter leaves out the division of AVG, and does not take every type."""
    for part in parts:
        dist.all_reduce(part, run.op, group=run.group)
    return [parts[run.rank]]
