"""Which parameters want a gradient, which hold one between steps, and in whose memory.

Contract: the values do not matter (a step begins by clearing them), their presence and place do. DDP with
gradient_as_bucket_view divides a gradient that lies in its bucket by the world size, but multiplies one that it has to move
there by the reciprocal: with three ranks the last bits differ. And optimizers skip a parameter without a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from tmd_worker.state.errors import StateMismatch

#: For each parameter in order: the gradient that it held, or None, and requires_grad. Weak, so that nothing outlives a zero_grad.
Pattern = list[tuple[weakref.ref[torch.Tensor] | None, bool]]
#: In the byte of a parameter for a joiner.
_HELD, _WANTED = 1, 2


class Gradients:
    """The gradients of the tracked parameters."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        #: What the shadow steps left, by name: memory that DDP knows.
        self._learned: dict[str, torch.Tensor] = {}

    def pattern(self) -> Pattern:
        """As it is now, for `restore`."""
        return [(None if p.grad is None else weakref.ref(p.grad), p.requires_grad) for p in self._parameters.values()]

    def restore(self, pattern: Pattern) -> None:
        """Nothing of what has been added since stays: zero where there was a gradient that still exists, else None."""
        for parameter, (held, wanted) in zip(self._parameters.values(), pattern, strict=True):
            parameter.grad = _zeroed(None if held is None else held())
            parameter.requires_grad_(wanted)

    def learn(self) -> None:
        """The shadow steps are over: a standby keeps the memory for its role's gradients, zeros by now, as in the pause it would
        take as long as to hand over a tenth of the state."""
        zeroed = {name: _zeroed(parameter.grad) for name, parameter in self._parameters.items()}
        self._learned = {name: gradient for name, gradient in zeroed.items() if gradient is not None}

    def presence(self) -> bytes:
        """One byte for each parameter in order, for a joiner."""
        return bytes(_HELD * (p.grad is not None) | _WANTED * p.requires_grad for p in self._parameters.values())

    def check(self, presence: object) -> bytes:
        """Raises StateMismatch if this is not the presence of these parameters' gradients."""
        if not isinstance(presence, bytes) or len(presence) != len(self._parameters):
            raise StateMismatch("structure: malformed list of gradients; nothing was changed")
        return presence

    def adopt(self, presence: bytes) -> None:
        """Zeros where the source holds a gradient, None elsewhere; a parameter that was frozen or thawed there is so here."""
        for (name, parameter), byte in zip(self._parameters.items(), presence, strict=True):
            parameter.requires_grad_(bool(byte & _WANTED))
            if byte & _HELD:
                learned = self._learned.get(name)
                parameter.grad = torch.zeros_like(parameter) if learned is None else learned
            else:
                parameter.grad = None
        self._learned = {}


def _zeroed(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.grad_fn is not None:
        return None
    return gradient.zero_()
