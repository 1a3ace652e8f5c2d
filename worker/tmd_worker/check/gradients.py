"""Parameters whose gradients the script carries from one step into the next: tmd empties them when a step is given up.

The first gradient of a step that arrives at a parameter must find none there, or zeros.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import torch


class CarriedGradients:
    """Use as a context manager around the shadow steps; `next_step` before each."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._hooks = contextlib.ExitStack()
        self._step = -1
        #: Name -> the last step in which a gradient arrived at it.
        self._arrived: dict[str, int] = {}
        #: Names, in the order in which they were found.
        self.carried: list[str] = []

    def __enter__(self) -> CarriedGradients:
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._hooks.enter_context(_hooked(parameter, functools.partial(self._note, name, parameter)))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def next_step(self) -> None:
        self._step += 1

    def _note(self, name: str, parameter: torch.nn.Parameter, _gradient: torch.Tensor) -> None:
        """Called before the gradient is added to what is there."""
        if self._step > 0 and self._arrived.get(name) != self._step and name not in self.carried:
            held = parameter.grad
            if held is not None and bool(held.count_nonzero()):
                self.carried.append(name)
        self._arrived[name] = self._step


@contextlib.contextmanager
def _hooked(parameter: torch.nn.Parameter, hook: functools.partial[None]) -> Iterator[None]:
    handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()
