"""The functional forms, and backward passes through them."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.transport.conformance.registry import Run, operation


@operation
def functional_collectives(run: Run) -> list[Tensor]:
    group, op = run.group, run.case.reduction.lower()
    whole = run.own(0, run.size * 6).reshape(-1)
    results = [
        functional.all_reduce(whole, op, group),
        functional.all_gather_single(whole, 0, group),
        functional.reduce_scatter_single(whole, op, 0, group),
        functional.all_to_all_single(whole, None, None, group),
        functional.broadcast(whole, run.case.root, group),
        *functional.all_reduce_coalesced([whole, whole[:3]], op, group),
        *functional.all_gather_single_coalesced([whole, whole[:3].contiguous()], group),
        *functional.reduce_scatter_single_coalesced([whole, whole + whole], op, [0, 0], group),
    ]
    return [functional.wait_tensor(result).clone() for result in results]


@operation
def functional_gradients(run: Run) -> list[Tensor]:
    """Backward passes through the collectives."""
    weights = torch.arange(run.size * 4, dtype=torch.float64) + run.rank
    results = []
    for function in (
        lambda x: functional.all_gather_single_autograd(x, 0, run.group),
        lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, run.group),
        lambda x: functional.all_to_all_single_autograd(x, None, None, run.group),
    ):
        leaf = weights.clone().requires_grad_()
        output = function(leaf)
        (output * (1.0 + run.rank) * torch.arange(output.numel(), dtype=torch.float64)).sum().backward()
        assert leaf.grad is not None
        results += [output.detach().clone(), leaf.grad]
    return results
