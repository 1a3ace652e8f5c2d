"""Random cases, the same on every rank, and the values that each member brings."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
#: Types that gloo can add.
ADDABLE = [*FLOATS, *INTEGERS, torch.bool]
#: Around the limit between tree and ring (64 KiB), the size of a frame (1 MiB), and what is left over in each.
_EDGES_BYTES = [0, 1, 40, 65_536, 65_537, 70_000, 1 << 20, (1 << 20) + 8, 3_000_000]
LAYOUTS = ["plain", "strided", "offset", "transposed"]
#: What outputs hold before; no case yields it everywhere.
UNTOUCHED = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on all members of a group."""

    seed: int
    operation: str
    elements: int
    dtype: torch.dtype
    reduction: str
    root: int
    layout: str

    def choose(self) -> random.Random:
        """Further choices, the same on every member."""
        return random.Random(self.seed)

    def values(self, member: int, part: int, elements: int) -> Tensor:
        """What this member passes. Small whole numbers: their sums are exact in every type, whatever the order."""
        generator = torch.Generator().manual_seed(self.seed * 10_007 + member * 101 + part)
        low, high = (1, 3) if self.reduction == "PRODUCT" else (0, 4)
        if self.dtype is torch.bool:
            low, high = 0, 2
        return torch.randint(low, high, (elements,), generator=generator).to(self.dtype)


def random_case(seed: int, operation: str, members: int, *, largest_bytes: int, smallest_bytes: int = 0) -> Case:
    """The sizes are those at which something changes, or any from `smallest_bytes` on."""
    choose = random.Random(seed)
    dtype = choose.choice([*FLOATS, *INTEGERS] if operation.startswith("functional") else [*ADDABLE, torch.complex64])
    reductions = ["SUM", "PRODUCT", "MIN", "MAX"]
    if operation.startswith("functional"):
        reductions = ["SUM", "MAX"]
    elif dtype in FLOATS:
        reductions.append("AVG")
    elif dtype is torch.complex64:
        reductions = ["SUM", "AVG"]
    else:
        reductions += ["BAND", "BOR", "BXOR"]
    if smallest_bytes:
        edge_bytes = choose.randint(smallest_bytes, largest_bytes)
    else:
        edge_bytes = choose.choice([*(size for size in _EDGES_BYTES if size <= largest_bytes), choose.randint(0, 5000)])
    elements = edge_bytes // dtype.itemsize + choose.choice([0, 0, 1])
    root = choose.randrange(members)
    return Case(seed, operation, elements, dtype, choose.choice(reductions), root, choose.choice(LAYOUTS))


def laid_out(values: Tensor, layout: str) -> Tensor:
    """A tensor with these elements, in memory of another order, or within more memory."""
    elements = values.numel()
    if layout == "strided":
        room = torch.zeros(2 * elements, dtype=values.dtype)[::2]
    elif layout == "offset":
        room = torch.zeros(elements + 3, dtype=values.dtype)[3:]
    elif layout == "transposed" and elements and elements % 3 == 0:
        room = torch.zeros(elements // 3, 3, dtype=values.dtype).t()
    else:
        return values
    return room.copy_(values.view(room.shape))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Elementwise, in logical order. A sum of bools is 2 in gloo and true here."""
    if one.dtype is torch.bool:
        return torch.equal(plain(one).view(torch.uint8) != 0, plain(other).view(torch.uint8) != 0)
    return torch.equal(plain(one).view(torch.uint8), plain(other).view(torch.uint8))


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
