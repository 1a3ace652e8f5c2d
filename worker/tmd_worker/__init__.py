"""What runs on compute nodes: the agent (`tmd-run`) and the library in each rank (`from tmd_worker import Session`).

Importing this package alone loads neither torch nor numpy, so that the agent stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tmd_worker.session import Session, StepDiscarded

__all__ = ["Session", "StepDiscarded"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tmd_worker import session

        return getattr(session, name)
    raise AttributeError(f"module 'tmd_worker' has no attribute {name!r}")
