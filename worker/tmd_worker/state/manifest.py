"""What is handed over, described: every tensor by name, type, shape and size, and the small structured rest."""

from __future__ import annotations

import math

import msgspec
import torch

from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.tensors import DTYPES, dtype_name, memory_order, size_bytes

#: Far above any optimizer's state, low enough that a wrong manifest cannot exhaust memory.
MAX_BYTES_PER_PARAMETER_BYTE = 64
MAX_OVERHEAD_BYTES = 256 << 20
#: torch's own limit.
MAX_DIMENSIONS = 64


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a state. `order` is its tensors.memory_order; `device` is "cpu" or the accelerator's kind."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    size_bytes: int
    device: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorEntry:
        order, kind = memory_order(tensor), tensor.device.type
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), order, size_bytes(tensor), kind)

    def contradiction(self) -> str:
        """What makes it impossible, in words; empty: nothing."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None or min(self.shape, default=0) < 0 or len(self.shape) > MAX_DIMENSIONS:
            return f"has the impossible type or shape {self.dtype}{self.shape}"
        if self.size_bytes != math.prod(self.shape) * dtype.itemsize:
            return f"announces {self.size_bytes} bytes for {self.dtype}{self.shape}"
        if self.order and not _is_permutation(self.shape, self.order):
            return f"has the impossible memory order {self.order}"
        return ""

    def difference(self, here: TensorEntry) -> str:
        """What differs, in words; empty: nothing."""
        parts = [
            f"{what} {theirs!r} there and {ours!r} here"
            for what, theirs, ours in (
                ("type", self.dtype, here.dtype),
                ("shape", self.shape, here.shape),
                ("memory order", self.order, here.order),
                ("device", self.device, here.device),
            )
            if theirs != ours
        ]
        return ", ".join(parts)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state as it is before `step`. Digests travel after the bytes, see handoff."""

    #: The step that comes next, and the epoch in which the source ran last.
    step: int
    epoch: int
    #: Parameters in the order of the model, then tensors of the optimizers.
    entries: tuple[TensorEntry, ...]
    #: Everything that is not a tensor entry, encoded by tree.encode.
    structure: bytes
    #: The source's own record of the last vote, and what has changed since (empty: nothing).
    record: bytes
    tail: bytes = b""

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def check_sizes(self, parameter_bytes: int) -> None:
        """Raises StateMismatch for entries that contradict themselves, occur twice, or are beyond all reason."""
        seen = set()
        for entry in self.entries:
            problem = "is there twice" if entry.name in seen else entry.contradiction()
            if problem:
                raise StateMismatch(f"{entry.name}: it {problem}; nothing was changed")
            seen.add(entry.name)
        limit = parameter_bytes * MAX_BYTES_PER_PARAMETER_BYTE + MAX_OVERHEAD_BYTES
        if self.total_bytes > limit:
            raise StateMismatch(
                f"the state has {self.total_bytes} bytes, {limit} is the most for {parameter_bytes} bytes of parameters; "
                "nothing was changed"
            )


def _is_permutation(shape: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """The strides fill one stretch of memory."""
    expected = 1
    for stride, size in sorted(zip(order, shape, strict=False)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return len(order) == len(shape)
