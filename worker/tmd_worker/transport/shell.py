"""What PyTorch sees: the backend `tmd`, whose process groups keep name, rank and size while links come and go."""

from __future__ import annotations


def register() -> None:
    """Makes `backend="tmd"` known to torch.distributed (CPU). Idempotent."""
