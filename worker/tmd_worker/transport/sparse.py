"""The sum of sparse tensors, as DDP needs it for the gradients of `nn.Embedding(sparse=True)`.

Every member gathers the indices and values of all and adds them in order of rank: so the result has the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmd_worker.transport.inner import Collectives
from tmd_worker.transport.tensors import Reduction


def check(tensors: list[Tensor], kind: Reduction, name: str) -> None:
    """Raises TypeError for what cannot be done; gloo takes one tensor in each call, and sums alone."""
    if len(tensors) != 1 or kind is not Reduction.SUM:
        raise TypeError(f"{name} of sparse tensors on the tmd backend takes one tensor and ReduceOp.SUM; convert with to_dense()")
    if tensors[0].layout is not torch.sparse_coo or tensors[0].device.type != "cpu":
        raise TypeError(
            f"{name} on the tmd backend takes dense and sparse_coo CPU tensors, got {tensors[0].layout} on {tensors[0].device}"
        )


def total(carrier: Collectives, tensor: Tensor, size: int) -> None:
    """`tensor` becomes the sum, coalesced. Its shape is that of all members' tensors. Called without grad."""
    own = tensor.detach().coalesce()
    counts = _gathered(carrier, torch.tensor([own._nnz()]), [(1,)] * size)
    numbers = [int(count) for count in counts]
    indices = _gathered(carrier, own.indices(), [(own.sparse_dim(), number) for number in numbers])
    values = _gathered(carrier, own.values(), [(number, *own.values().shape[1:]) for number in numbers])
    places, owners = torch.unique(torch.cat(indices, 1), dim=1, return_inverse=True)
    sums = torch.zeros((places.shape[1], *own.values().shape[1:]), dtype=own.dtype)
    for part, owner in zip(values, owners.split(numbers), strict=True):
        sums.index_add_(0, owner, part)  # a member's own indices differ from one another
    # not by way of detach(): a sparse alias gets indices and values of its own
    tensor.copy_(torch.sparse_coo_tensor(places, sums, tensor.shape, is_coalesced=True, check_invariants=False))


def total_locally(tensor: Tensor, size: int) -> None:
    """As if every member had passed this one. Called without grad."""
    tensor.mul_(size)


def _gathered(carrier: Collectives, own: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """What each member passed."""
    outputs = [torch.empty(shape, dtype=own.dtype) for shape in shapes]
    carrier.allgather(outputs, own)
    return outputs
