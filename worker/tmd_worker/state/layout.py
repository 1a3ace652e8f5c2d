"""What a script has built, in words: names, types and shapes of everything that is tracked, without a single value.

A standby compares its own with that of the role it rehearses, so that it is found unfit before it is ever given a role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.tensors import dtype_name, memory_order

if TYPE_CHECKING:
    from tmd_worker.state.tracked import Tracked

#: Differences that a message lists.
_LISTED = 3


def layout(tracked: Tracked) -> tuple[str, ...]:
    """One line for each parameter, buffer, optimizer group and other tracked object."""
    return (
        *(f"parameter {_tensor(name, parameter)}" for name, parameter in tracked.parameters.items()),
        *(f"buffer {_tensor(name, buffer)}" for name, buffer in tracked.buffers),
        *(
            f"optimizer {name}: {type(optimizer).__name__} with {len(group['params'])} parameters in group {number}"
            for name, optimizer in tracked.optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
        ),
        *(f"scheduler {name}: {type(scheduler).__name__}" for name, scheduler in tracked.schedulers.items()),
        *(f"{name}: {type(other).__name__}" for name, other in {**tracked.scalers, **tracked.others}.items()),
        *(f"data {name}" for name in tracked.loaders),
    )


def require_same(theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Raises StateMismatch naming what only one of both has built."""
    if list(theirs) == list(ours):
        return
    only = [(_listed(set(theirs) - set(ours)), "only there"), (_listed(set(ours) - set(theirs)), "only here")]
    what = "; ".join(f"{lines} {where}" for lines, where in only if lines) or "the same parts in another order"
    raise StateMismatch(
        f"this standby's main has built something else than the job's: {what}. It could never hold the state of a rank, so it "
        "ends; do script, arguments, environment and installed packages agree with those of the other nodes?"
    )


def _listed(lines: set[str]) -> str:
    found = sorted(lines)
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def _tensor(name: str, tensor: torch.Tensor) -> str:
    order = memory_order(tensor)
    return f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}{f' in memory order {list(order)}' if order else ''}"
