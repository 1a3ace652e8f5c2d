"""Tensors as bytes, and the reductions on them. Every tensor here is a dense CPU tensor."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

#: Messages up to this size go through the tree, larger ones around the ring. It decides the order of summation, so it is fixed.
SMALL_BYTES = 64 << 10


class Reduction(enum.Enum):
    SUM = enum.auto()
    AVG = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    PRODUCT = enum.auto()


def reduction(op: object, tensors: Sequence[Tensor]) -> Reduction:
    """What PyTorch's ReduceOp means here. Raises NotImplementedError or TypeError naming what does not go."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in Reduction.__members__:
        raise NotImplementedError(f"the reduction {name} is not supported on the tmd backend yet")
    kind = Reduction[name]
    for tensor in tensors:
        if kind is Reduction.AVG and not tensor.dtype.is_floating_point:
            raise TypeError(f"ReduceOp.AVG needs floating point, got {tensor.dtype}; sum and divide yourself")
        if tensor.dtype.is_complex and kind is not Reduction.SUM:
            raise TypeError(f"{op} is not defined for {tensor.dtype}")
    return kind


def check(tensors: Sequence[Tensor], operation: str) -> None:
    """Raises TypeError for tensors that the backend cannot move."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise TypeError(f"{operation} on the tmd backend needs dense CPU tensors, got {tensor.layout} on {tensor.device}")


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """The elements in one dimension: a view if the tensor is contiguous, else a copy (see `put_back`)."""
    return tensor.detach().contiguous().view(-1)


def put_back(copy: Tensor, tensor: Tensor) -> None:
    """After work on `flat(tensor)`: writes the result if that was a copy."""
    if copy.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(copy.view(tensor.shape))


def byte_view(contiguous: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(contiguous.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor over writable memory."""
    return torch.frombuffer(data, dtype=dtype)


def combine(kind: Reduction, into: Tensor, other: Tensor) -> None:
    """into = into (op) other, elementwise, rounded to their type."""
    if into.dtype is torch.bool:
        if kind in (Reduction.SUM, Reduction.MAX):
            into.logical_or_(other)
        else:
            into.logical_and_(other)
    elif kind in (Reduction.SUM, Reduction.AVG):
        into.add_(other)
    elif kind is Reduction.MIN:
        torch.minimum(into, other, out=into)
    elif kind is Reduction.MAX:
        torch.maximum(into, other, out=into)
    else:
        into.mul_(other)


def finish(kind: Reduction, total: Tensor, members: int) -> None:
    """What comes after the last combination."""
    if kind is Reduction.AVG:
        total.div_(members)
