"""What of the user's objects can be tracked, seen through the wrappers around it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from tmd_worker.state import tree
from tmd_worker.state.errors import TrackRefused


class LoadsState(Protocol):
    """Anything whose state goes out and in as nested values."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class ExtraState:
    """The state that a module keeps beside its tensors (get_extra_state, set_extra_state)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return self._module.get_extra_state()

    def load_state_dict(self, state_dict: Any) -> None:
        self._module.set_extra_state(state_dict)


def unwrapped(obj: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile, so that names do not depend on how it is wrapped."""
    while True:
        if isinstance(obj, DistributedDataParallel):
            obj = obj.module
        elif isinstance(obj, torch.nn.Module) and type(obj).__name__ == "OptimizedModule":
            obj = obj._orig_mod
        else:
            return obj


def refuse_module(name: str, module: torch.nn.Module) -> None:
    """Raises TrackRefused for a module that is spread over ranks."""
    for path, part in module.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
            raise TrackRefused(
                f"cannot track {name}: {path or 'it'} is sharded (FullyShardedDataParallel); this release replaces ranks of "
                "replicated data parallel jobs only"
            )


def extra_states(name: str, module: torch.nn.Module) -> dict[str, LoadsState]:
    """By name, for every submodule that has any. Raises TrackRefused for one that is of no known kind."""
    found: dict[str, LoadsState] = {}
    for path, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            full = f"{name}/{path}._extra_state"
            found[full] = ExtraState(part)
            tree.encode(part.get_extra_state(), full)
    return found


def load_scaler(scaler: torch.amp.GradScaler, state: Any) -> None:
    """Also forgets what an interrupted step had unscaled: otherwise the next unscale_() would be refused."""
    if scaler.is_enabled():
        scaler.load_state_dict(state)
        scaler._per_optimizer_states.clear()
