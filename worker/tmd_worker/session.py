"""What a training script uses: `Session.run(main)`, and in `main` the session's `track` and `steps`.

Contract: the same script runs as a member of a job, as a standby that rehearses one, and without tmd as plain distributed
PyTorch. Which of them it is, only `session.live` tells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from tmd_worker.discard import StepDiscarded
from tmd_worker.step import Step

__all__ = ["Session", "Step", "StepDiscarded"]

#: Set by the agent: the descriptor of this rank's socket to it.
CONTROL_FD = "TMD_CONTROL_FD"

Result = TypeVar("Result")


class Engine(Protocol):
    """What a session runs on."""

    @property
    def live(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def track(self, name: str, obj: Any, *, undo: bool) -> None: ...
    def untracked(self, obj: Any) -> None: ...
    def steps(self, total: int) -> Iterator[Step]: ...
    def vote(self) -> None: ...
    def on_role(self, callback: Callable[[int], None]) -> None: ...
    def log_only(self) -> AbstractContextManager[None]: ...
    def digest(self) -> dict[str, str]: ...


class RunsMain(Protocol):
    """An engine that calls main itself."""

    def run(self, main: Callable[[Engine], Result]) -> Result: ...


#: Set by `tmd-run --check`, in the one process that it starts.
engine_of_check: RunsMain | None = None


class Session:
    """One process of a training job."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looped = False

    @classmethod
    def run(cls, main: Callable[[Session], Result]) -> Result:
        """Calls `main` with a session, its process group set up, and returns what it returns.

        Under tmd this returns only on ranks that are still members at the end; a rank that is replaced, and a standby that
        is not needed, end inside.
        """
        if engine_of_check is not None:
            return engine_of_check.run(lambda engine: main(cls(engine)))
        if CONTROL_FD in os.environ:
            from tmd_worker.member import MemberEngine

            return MemberEngine.run(int(os.environ[CONTROL_FD]), lambda engine: main(cls(engine)))
        from tmd_worker.plain import PlainEngine

        with PlainEngine() as engine:
            return main(cls(engine))

    @property
    def rank(self) -> int:
        """The rank of this process. A standby shows a representative one until it takes a role: read it when you need it."""
        return self._engine.rank

    @property
    def local_rank(self) -> int:
        """The slot on this node, for choosing a device."""
        return self._engine.local_rank

    @property
    def world_size(self) -> int:
        return self._engine.world_size

    @property
    def live(self) -> bool:
        """False while nothing that is computed here counts: on a standby without a role, and in shadow steps."""
        return self._engine.live

    def track(self, *, undo: bool = False, **objects: Any) -> None:
        """Names what belongs to the training state: models, optimizers, schedulers, scalers, data, EMA, anything that changes.

        `undo` is for optimizers that step before the last backward of a step (a GAN's first one): a copy of their parameters
        and state is kept for the length of each step. Raises TrackRefused for what cannot be kept bit for bit.
        """
        for name, obj in objects.items():
            self._engine.track(name, obj, undo=undo)

    def untracked(self, *objects: Any) -> None:
        """Says that these are no part of the training state, although they may change: a metric, an evaluation's data.

        A joiner has them as its own build left them. The check of the first step, and `tmd-run --check`, pass over them.
        """
        for obj in objects:
            self._engine.untracked(obj)

    def steps(self, total: int) -> Iterator[Step]:
        """The training loop, up to step `total` (steps already done elsewhere count). Once in a process.

        Each process first takes two shadow steps that leave no trace; a standby then waits here for its role.
        """
        if self._looped:
            raise RuntimeError("session.steps can be used once; put all phases of the training into one loop")
        self._looped = True
        return self._engine.steps(total)

    def vote(self) -> None:
        """For optimizers without hooks: call it in `with step:` when all gradients are complete, before changing parameters.

        Raises StepDiscarded if the step is not to be applied; let that pass.
        """
        self._engine.vote()

    def on_role(self, callback: Callable[[int], None]) -> None:
        """`callback(rank)` is called when this process takes a role, before it loads that role's state."""
        self._engine.on_role(callback)

    def log_only(self) -> AbstractContextManager[None]:
        """Collectives in this context may come after the vote. Their result is for logs only: it may be NaN."""
        return self._engine.log_only()

    def digest(self) -> dict[str, str]:
        """Digests of the tracked state of this rank ("parameters", "optimizer", "small"), for comparing two runs bit for bit."""
        return self._engine.digest()
