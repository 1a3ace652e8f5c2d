"""Tensors as bytes, and the reductions on them. Every tensor here is a dense CPU tensor; for sparse ones see `sparse`."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

#: What torch says of a tensor of which it is sure; of others it does not know, and writes to them.
_OVERLAPS = 1
#: Messages up to this size go through the tree, larger ones around the ring. It decides the order of summation, so it is fixed.
SMALL_BYTES = 64 << 10


class Reduction(enum.Enum):
    SUM = enum.auto()
    AVG = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    PRODUCT = enum.auto()
    BAND = enum.auto()
    BOR = enum.auto()
    BXOR = enum.auto()


_BITWISE = {Reduction.BAND, Reduction.BOR, Reduction.BXOR}
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}
_SUMS = {Reduction.SUM, Reduction.AVG}


def reduction(op: object, tensors: Sequence[Tensor]) -> Reduction:
    """What PyTorch's ReduceOp means here. Raises NotImplementedError or TypeError naming what does not go."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in Reduction.__members__:
        raise NotImplementedError(f"the reduction {name} is not supported on the tmd backend; scale and sum yourself")
    kind = Reduction[name]
    for tensor in tensors:
        _check_arithmetic(kind, tensor.dtype)
    return kind


def _check_arithmetic(kind: Reduction, dtype: torch.dtype) -> None:
    if kind is Reduction.AVG and dtype in _INTEGERS:
        raise TypeError(f"ReduceOp.AVG needs floating point, got {dtype}; sum and divide yourself")
    if kind in _BITWISE and dtype not in _INTEGERS:
        raise TypeError(f"ReduceOp.{kind.name} needs integers or bool, got {dtype}")
    if dtype not in _INTEGERS | _FLOATS and not (dtype in _COMPLEX and kind in _SUMS):
        raise TypeError(f"ReduceOp.{kind.name} is not defined for {dtype} on the tmd backend; convert before and after")


def check(tensors: Sequence[Tensor], operation: str, written: Sequence[Tensor] = ()) -> None:
    """Raises TypeError for tensors that the backend cannot move, ValueError for one of `written` that overlaps itself."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
            what = "a nested tensor" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
            raise TypeError(f"{operation} on the tmd backend needs dense CPU tensors, got {what}")
    for tensor in written:
        if torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
            raise ValueError(
                f"{operation} cannot write to a tensor several elements of which are one place in memory (shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}, as expand() makes them); clone() it before"
            )


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """The elements in one dimension: a view if the tensor is contiguous, else a copy (see `put_back`)."""
    if tensor.dim() == 1 and tensor.stride(0) == 1 and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return tensor
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()  # memory holds other values than the tensor until then
    return _in_line(plain.contiguous())


def _in_line(contiguous: Tensor) -> Tensor:
    """A view in one dimension with stride 1. A tensor of one element counts as contiguous whatever its stride says."""
    if contiguous.numel() < 2:
        return contiguous.as_strided((contiguous.numel(),), (1,))
    return contiguous.view(-1)


def put_back(copy: Tensor, tensor: Tensor) -> None:
    """After work on `flat(tensor)`: writes the result if that was a copy."""
    if copy.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(copy.view(tensor.shape))


def byte_view(contiguous: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(_in_line(contiguous.detach()).view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor over writable memory."""
    return torch.frombuffer(data, dtype=dtype)


def combine(kind: Reduction, into: Tensor, other: Tensor) -> None:
    """into = into (op) other, elementwise, rounded to their type."""
    if kind is Reduction.BAND:
        into.bitwise_and_(other)
    elif kind is Reduction.BOR:
        into.bitwise_or_(other)
    elif kind is Reduction.BXOR:
        into.bitwise_xor_(other)
    elif into.dtype is torch.bool:
        if kind in (Reduction.SUM, Reduction.MAX):
            into.logical_or_(other)
        else:
            into.logical_and_(other)
    elif kind in _SUMS:
        into.add_(other)
    elif kind is Reduction.MIN:
        _take(other, into, other < into)
    elif kind is Reduction.MAX:
        _take(other, into, other > into)
    else:
        into.mul_(other)


def _take(other: Tensor, into: Tensor, wanted: Tensor) -> None:
    """Where it is wanted, or is no number. (Which of 0 and -0 torch.minimum yields depends on the place and on the processor.)"""
    into.copy_(torch.where(wanted | (other != other), other, into))


def finish(kind: Reduction, total: Tensor, members: int) -> None:
    """What comes after the last combination."""
    if kind is Reduction.AVG:
        real = torch.view_as_real(total) if total.is_complex() else total  # a complex quotient is rounded otherwise
        real.div_(members)
