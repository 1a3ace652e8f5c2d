"""The same script without a daemon: plain distributed PyTorch, or a world of one. Every step is committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tmd_worker.state.tracked import Tracked
from tmd_worker.step import Step, draw_from


class PlainEngine:
    """What a session runs on when no agent has started it: a launcher such as torchrun, or nobody."""

    def __init__(self) -> None:
        self._tracked = Tracked()
        self._joined = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.live = True

    def __enter__(self) -> PlainEngine:
        if not dist.is_initialized():
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            self._joined = True
        self._tracked.set_role(self.rank, self.world_size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def track(self, name: str, obj: Any, *, undo: bool) -> None:
        self._tracked.add(name, obj, undo=undo)

    def untracked(self, obj: Any) -> None:
        pass  # nothing is asked of it here

    def steps(self, total: int) -> Iterator[Step]:
        for index in range(total):
            step = Step(self, index, shadow=False)
            yield step
            step.require_body()

    def vote(self) -> None:
        pass  # nobody else can be lost

    def digest(self) -> dict[str, str]:
        return self._tracked.digest()

    def on_role(self, callback: Callable[[int], None]) -> None:
        pass  # the role never changes

    def log_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    # StepDriver

    def enter(self, step: Step) -> None:
        pass

    def leave(self, step: Step, error: BaseException | None) -> bool:
        step.committed = error is None
        return False

    def draw(self, step: Step, name: str | None) -> Any:
        return draw_from(self._tracked.loaders, name)
