"""The shadow steps, and how many of them are enough: until every DistributedDataParallel that runs has settled on its buckets.

DDP rebuilds its buckets, with a collective, in the forward after the first complete backward; with static_graph one step
later. A joiner that still had that before it would call a collective that nobody else calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from tmd_worker.step import Step, StepDriver

#: The second one runs on what the first one has set up (optimizer state, buckets, compiled code).
LEAST_STEPS = 2
#: A module that runs without gradients never settles.
MOST_STEPS = 5


class Watch(Protocol):
    """Looks on while the shadow steps run."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    def next_step(self) -> None:
        """Another step is about to begin."""


def shadow_steps(driver: StepDriver, watches: Sequence[Watch]) -> Iterator[Step]:
    """As many as are enough, each in the view of `watches`."""
    done = 0
    with Settling() as settling, contextlib.ExitStack() as looking:
        for watch in watches:
            looking.enter_context(watch)
        while settling.wants_more(done):
            for watch in watches:
                watch.next_step()
            step = Step(driver, done, shadow=True)
            yield step
            step.require_body()
            done += 1


class Settling:
    """Use as a context manager around the shadow steps."""

    def __init__(self) -> None:
        self._seen: set[DistributedDataParallel] = set()

    def __enter__(self) -> Settling:
        self._hook = register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def wants_more(self, done: int) -> bool:
        """True if another shadow step is needed after `done` of them."""
        if done < LEAST_STEPS:
            return True
        return done < MOST_STEPS and not all(_has_settled(module) for module in self._seen)

    def _note(self, module: torch.nn.Module, _inputs: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._seen.add(module)


def _has_settled(module: DistributedDataParallel) -> bool:
    never_rebuilds = module.find_unused_parameters and not module.static_graph
    return never_rebuilds or module._has_rebuilt_buckets
