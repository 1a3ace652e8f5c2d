"""A place inside backward at which a fault may fire."""

from __future__ import annotations

from typing import Any

import torch

from tmd_worker import faults


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        faults.point("backward")
        return gradient.clone()


def fault_in_backward(x: torch.Tensor) -> torch.Tensor:
    """Returns x; its backward passes the point "backward"."""
    result: torch.Tensor = _Identity.apply(x)
    return result
