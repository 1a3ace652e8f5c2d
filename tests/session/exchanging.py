"""A layer that cannot do without the other ranks: parts of the activations for each, and messages from one to the next."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def exchanged(x: Tensor) -> Tensor:
    """Columns of everybody's activations, which the backward pass sends back, and what the others' look like."""
    columns = functional.all_to_all_single_autograd(x.t().contiguous(), None, None, dist.group.WORLD)
    return columns.t() + 0.1 * _of_the_previous(x.detach().mean(0)) + 0.01 * _greatest(x.detach().max().view(1))


def _of_the_previous(mean: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return mean
    theirs = torch.empty_like(mean)
    operations = [
        dist.P2POp(dist.isend, mean, (rank + 1) % size, tag=1),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % size, tag=1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs


def _greatest(own: Tensor) -> Tensor:
    """Rank 0 hears from the others in whatever order and tells everybody."""
    if dist.get_rank():
        dist.send(own, 0, tag=2)
    else:
        for _ in range(dist.get_world_size() - 1):
            theirs = torch.empty_like(own)
            dist.recv(theirs, tag=2)
            own = torch.maximum(own, theirs)
    dist.broadcast(own, 0)
    return own
