"""What the core answers to the main thread of a rank, and the one error it raises."""

from __future__ import annotations

import dataclasses
import enum


class BrokenInvariant(RuntimeError):
    """Two ranks disagree about what was decided. The process must end: going on could make states diverge."""


class Admission(enum.Enum):
    """What becomes of a collective that the user's code calls now."""

    #: Send it.
    PROCEED = enum.auto()
    #: Shadow step: local, with valid values.
    SANDBOX = enum.auto()
    #: Poisoned, inside autograd: complete locally with valid values.
    LOCAL = enum.auto()
    #: Poisoned, outside autograd: raise StepDiscarded.
    DISCARD = enum.auto()
    #: After the yes: it could fail on some ranks only, so it is refused.
    AFTER_VOTE = enum.auto()


class Turn(enum.Enum):
    """What the main thread does at a step boundary."""

    RUN = enum.auto()
    #: Nothing yet: ask again after Wake.
    WAIT = enum.auto()


class Verdict(enum.Enum):
    """What the vote means for this rank."""

    APPLY = enum.auto()
    DISCARD = enum.auto()
    #: Unknown: block with the gradients untouched, ask `verdict` again after Wake.
    BLOCK = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The answer at a step boundary: `step` in `epoch`; `rollback` if the attempt before was discarded."""

    turn: Turn
    step: int = 0
    epoch: int = -1
    rollback: bool = False
