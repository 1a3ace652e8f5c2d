"""One training step as the user's loop sees it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol


class Source(Protocol):
    """Tracked data."""

    def next(self) -> Any:
        """The next batch."""


class StepDriver(Protocol):
    """Who decides what a step means: the warm-up, the live loop, or plain PyTorch without a daemon."""

    def enter(self, step: Step) -> None:
        """`with step:` begins."""

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """`with step:` ends; True swallows the error. Sets `step.committed`."""
        raise NotImplementedError

    def draw(self, step: Step, name: str | None) -> Any:
        """The next batch of the tracked data called `name` (None: of the only one)."""
        raise NotImplementedError


class StepMisused(RuntimeError):
    """The loop over `session.steps` does not use its steps as it must; the text says how."""


class Step:
    """A step lasts from one iteration of `session.steps` to the next; its computation belongs into `with step:`.

    It is computed again if a rank is lost before it is decided: then `committed` stays False, and what the code after the
    `with` block does to tracked objects is taken back too. Whatever commits something outside (a log line, a checkpoint)
    must look at `committed`.
    """

    __slots__ = ("_batch", "_drawn", "_driver", "committed", "entered", "index", "shadow")

    def __init__(self, driver: StepDriver, index: int, *, shadow: bool) -> None:
        self._driver = driver
        self._batch: Any = None
        self._drawn = False
        #: Number of the step, from 0. Attempts of the same step share it.
        self.index = index
        #: True in the warm-up: real computation whose every effect is taken back, communication that reaches nobody.
        self.shadow = shadow
        #: True once every rank has agreed to apply the step.
        self.committed = False
        #: True once the body has begun.
        self.entered = False

    @property
    def batch(self) -> Any:
        """The first batch of this step, drawn when it is asked for."""
        if not self._drawn:
            self._batch = self.next_batch()
        return self._batch

    def next_batch(self, name: str | None = None) -> Any:
        """One more batch, for gradient accumulation; `name` says of which tracked data if there are several."""
        batch = self._driver.draw(self, name)
        if not self._drawn:
            self._batch, self._drawn = batch, True
        return batch

    def __enter__(self) -> Step:
        if self.entered:
            raise StepMisused(f"step {self.index} was entered twice: one `with step:` for each step")
        self.entered = True
        self._driver.enter(self)
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        return self._driver.leave(self, error)

    def require_body(self) -> None:
        """Raises StepMisused if the loop went on without `with step:`."""
        if not self.entered:
            raise StepMisused(f"step {self.index} was not used: put its computation into `with step:`")

    def __repr__(self) -> str:
        return f"<step {self.index}{' shadow' if self.shadow else ''}{' committed' if self.committed else ''}>"


def draw_from(sources: Mapping[str, Source], name: str | None) -> Any:
    """The next batch of the tracked data called `name`, or of the only one. Raises StepMisused."""
    if name is not None and name in sources:
        return sources[name].next()
    if name is None and len(sources) == 1:
        return next(iter(sources.values())).next()
    known = f"tracked is {', '.join(sources)}" if sources else "nothing is; pass it to session.track"
    raise StepMisused(f"no data is called {name!r}: {known}" if name is not None else f"say which data to draw from: {known}")
