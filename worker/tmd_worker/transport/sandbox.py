"""Valid values without any peer: as if every member had passed what this one passed.

Used for shadow steps, and for what a poisoned process answers inside autograd. Never zeros, never what was in memory.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from tmd_worker.transport.tensors import Reduction

#: What an object collective unpickles to None: the objects of others are not known.
_NONE_PICKLED = pickle.dumps(None)
#: Functions of torch.distributed whose non-source ranks pass uninitialised memory to a broadcast, scatter or receive.
_OBJECT_COLLECTIVES = {"broadcast_object_list", "scatter_object_list", "recv_object_list"}
_FRAMES_UP = 10


def reduced(tensor: Tensor, kind: Reduction, members: int) -> None:
    """The reduction of `members` equal tensors. Left alone: a PRODUCT, whose powers would overflow, and BXOR, often all zeros."""
    if kind is Reduction.SUM and tensor.dtype is not torch.bool:
        tensor.detach().mul_(members)


def gathered(outputs: Sequence[Tensor], own: Tensor) -> None:
    """Everybody's is this one's, as far as the sizes allow."""
    source = own.detach().reshape(-1)
    for output in outputs:
        target = output.detach()
        if target.numel() == source.numel():
            target.copy_(source.view(target.shape))
        elif source.numel():
            repeats = -(-target.numel() // source.numel())
            target.copy_(source.repeat(repeats)[: target.numel()].view(target.shape))


def exchanged(outputs: Sequence[Tensor], inputs: Sequence[Tensor], rank: int) -> None:
    """An all-to-all in which everybody passed the same: what comes is what this one has for itself, for others, or ones."""
    own = inputs[rank]
    if not own.numel():
        own = torch.cat([part.detach().reshape(-1) for part in inputs])
    for output in outputs:
        if own.numel():
            gathered([output], own)
        else:
            received(output)


def uninitialised() -> bool:
    """True if this is called by an object collective, which passes uninitialised memory on all ranks but the source."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_UP):
        if frame.f_code.co_name in _OBJECT_COLLECTIVES:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def none_pickled(tensor: Tensor) -> None:
    """A size, or bytes that hold a None for every such size."""
    if tensor.dtype is torch.uint8:
        pattern = torch.frombuffer(bytearray(_NONE_PICKLED), dtype=torch.uint8)
        gathered([tensor], pattern)
    else:
        tensor.detach().fill_(len(_NONE_PICKLED))


def received(tensor: Tensor) -> None:
    """What a receive yields: ones, since nothing of this process's own says more."""
    tensor.detach().fill_(1)
