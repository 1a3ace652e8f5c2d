"""Where the commit vote meets the optimizers: it is cast in the pre-hook of the first one that cannot be undone.

Contract: an attached optimizer changes its parameters only in a step that was decided; one that was not attached is refused.
Ours is the last of its pre-hooks, so gradients are as the optimizer will see them (other hooks may still scale or clip them).
An optimizer tracked with undo=True steps before the vote; `save` keeps what a discard must put back. What steps after the vote
needs no undo, as long as its gradients were complete before: a later backward pass is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class OptimizerRefused(RuntimeError):
    """This use of an optimizer cannot be made safe against the loss of a rank; the text says why and what to do instead."""


class Optimizers:
    """The tracked optimizers of one process."""

    def __init__(
        self,
        *,
        vote: Callable[[], None],
        applied: Callable[[], None],
        save: Callable[[Optimizer], None],
        late_backward: Callable[[], bool],
    ) -> None:
        """`vote` raises StepDiscarded if the step is not to be applied; `applied` is told when an optimizer has stepped
        after it; `late_backward` says whether a backward pass has run since."""
        self._vote = vote
        self._applied = applied
        self._save = save
        self._late_backward = late_backward
        self._names: dict[Optimizer, str] = {}
        self._undo: set[Optimizer] = set()
        self._hooks: dict[Optimizer, int] = {}
        self._in_step = False
        self._shadow = False
        self._voter = ""
        #: Hooked into every optimizer for the length of a body.
        self._everywhere: RemovableHandle | None = None
        #: An attached optimizer is stepping: it may have inner ones, as those that shard their state do.
        self._stepping = False

    def attach(self, name: str, optimizer: Optimizer, *, undo: bool) -> None:
        """From now on the optimizer's steps are watched."""
        if optimizer in self._names:
            return
        self._names[optimizer] = name
        if undo:
            self._undo.add(optimizer)
        self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before).id
        optimizer.register_step_post_hook(self._after)

    def begin_step(self, *, shadow: bool) -> None:
        """A step's body begins: our hooks go last."""
        self.leave_body()
        self._in_step, self._shadow = True, shadow
        self._voter = ""
        self._everywhere = register_optimizer_step_pre_hook(self._refuse_stranger)
        for optimizer, hook in self._hooks.items():
            hooks = optimizer._optimizer_step_pre_hooks
            hooks[hook] = hooks.pop(hook)

    def end_step(self) -> None:
        """The body is over. Raises OptimizerRefused if a backward pass ran after the vote: its gradients were not reduced."""
        self.leave_body()
        self._refuse_late_backward()

    def discard(self) -> None:
        """Forgets the scaling that GradScaler.step lent a fused optimizer when the vote interrupted it."""
        self.leave_body()
        for optimizer in self._names:
            for attribute in ("grad_scale", "found_inf"):
                if hasattr(optimizer, attribute):
                    delattr(optimizer, attribute)

    def leave_body(self) -> None:
        """Optimizers of other places are let alone again."""
        self._in_step = self._stepping = False
        if self._everywhere is not None:
            self._everywhere.remove()
            self._everywhere = None

    def _refuse_stranger(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if optimizer not in self._names and not self._stepping:
            kind = type(optimizer).__name__
            raise OptimizerRefused(
                f"{kind}.step() was called, but session.track was not told of this {kind}: a joiner would not get its state, and "
                "the loss of a rank could leave its step half applied; pass it to session.track before the loop over the steps"
            )

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[optimizer]
        if not self._in_step:
            raise OptimizerRefused(f"{name}.step() was called outside `with step:`; nothing may change parameters there")
        if any(argument is not None for argument in args[1:]) or kwargs.get("closure") is not None:
            raise OptimizerRefused(f"{name}.step(closure) evaluates the model after the vote; call backward before step()")
        if torch._C._current_graph_task_id() != -1:
            raise OptimizerRefused(
                f"{name}.step() was called inside backward: other gradients are not complete then, so a rank lost in this step "
                "would leave it half applied; step after backward"
            )
        if not self._shadow:
            self._decide(optimizer, name)
        self._stepping = True

    def _decide(self, optimizer: Optimizer, name: str) -> None:
        """Raises StepDiscarded if the step is not to be applied."""
        self._refuse_late_backward()
        if self._voter:
            return
        if optimizer in self._undo:
            self._save(optimizer)
        else:
            self._vote()
            self._voter = name

    def _after(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._stepping = False
        if self._voter:
            self._applied()

    def _refuse_late_backward(self) -> None:
        if self._late_backward():
            first = self._voter or "the first optimizer"
            raise OptimizerRefused(
                f"a backward pass ran after {first} had stepped, so its gradients were not reduced; call every backward before "
                f"the first optimizer steps, or track {first} with undo=True"
            )
