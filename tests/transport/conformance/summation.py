"""The documented order of summation, written down a second time: what a float sum must be, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Up to this many bytes a message goes up the tree.
TREE_BYTES = 65_536
#: The ring cuts at multiples of so many elements.
ALIGNMENT = 16


def all_reduced(parts: Sequence[Tensor]) -> Tensor:
    """`parts`: what each member passes, in one dimension."""
    if parts[0].numel() * parts[0].element_size() <= TREE_BYTES:
        return _up_the_tree(parts, 0)
    members, elements = len(parts), parts[0].numel()
    each = -(-elements // members)
    each = -(-each // ALIGNMENT) * ALIGNMENT
    segments = [
        reduced_block([part[min(s * each, elements) : min((s + 1) * each, elements)] for part in parts], s)
        for s in range(members)
    ]
    return torch.cat(segments)


def reduced_block(parts: Sequence[Tensor], segment: int) -> Tensor:
    """Around the ring: the member after `segment` begins, `segment` itself comes last."""
    members = len(parts)
    total = parts[(segment + 1) % members].clone()
    for turn in range(2, members + 1):
        total = parts[(segment + turn) % members] + total
    return total


def _up_the_tree(parts: Sequence[Tensor], member: int) -> Tensor:
    """The own value, then each child's sum; the children of m are 2m+1 and 2m+2."""
    total = parts[member].clone()
    for child in (2 * member + 1, 2 * member + 2):
        if child < len(parts):
            total = total + _up_the_tree(parts, child)
    return total
