"""The position of this rank in its data. Contract: no batch is skipped, none is seen twice, whatever is discarded, handed
over or warmed up; a batch that a discarded step drew is given again with the RNG state that drawing it left behind."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from tmd_worker.state import rng, tree
from tmd_worker.state.errors import DataExhausted, StateMismatch, TrackRefused
from tmd_worker.state.sources import source_for


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    batch: Any
    #: The RNG after drawing it; None once the step is over that drew it.
    after: rng.RngState | None


class LoaderCursor:
    """One tracked source of data: a DataLoader, an object with iteration and state_dict/load_state_dict, any iterable, or a
    function `data(position)`, `data(position, rank)`, `data(position, rank, world_size)`. Epochs follow one another without end
    (`set_epoch` is called on loader, samplers and dataset where they have it)."""

    def __init__(self, name: str, source: Any, *, rank: int, world_size: int) -> None:
        """Raises TrackRefused if the order of `source` cannot be repeated."""
        self.name = name
        self._role = (rank, world_size)
        self._source = source_for(name, source, lambda: self._role)
        #: Drawn in this step, and drawn but to be given again.
        self._drawn: list[_Drawn] = []
        self._replay: collections.deque[_Drawn] = collections.deque()
        #: The last attempt was rolled back and nothing was drawn since: the next `begin_step` begins the same step again.
        self._again = False
        #: The source's state when last nothing was waiting to be given again, and how many were given since.
        self._base = self._encoded()
        self._given = 0
        self._held: bytes | None = None
        self._since_hold: list[Any] = []

    # ---------------------------------------------------------------- the step

    def next(self) -> Any:
        """The next batch. Raises DataExhausted if the source has ended and cannot start again."""
        self._again = False
        if self._replay:
            drawn = self._replay.popleft()
            if drawn.after is not None:
                rng.restore(drawn.after)
        else:
            drawn = self._draw()
        self._drawn.append(drawn)
        self._given += 1
        return drawn.batch

    def _draw(self) -> _Drawn:
        try:
            batch = self._source.draw()
        except StopIteration as error:
            raise DataExhausted(
                f"{self.name}: {error.value or 'it has ended and cannot start again'}; track a DataLoader, a list or "
                "an object whose iter() begins anew, or ask for fewer steps"
            ) from None
        if self._held is not None and not self._source.rewinds:
            self._since_hold.append(batch)
        return _Drawn(batch, rng.capture())

    def begin_step(self) -> None:
        """What was drawn so far is used; what is drawn from here on can be rolled back. After a rollback: another attempt."""
        again, self._again = self._again, False
        self._drawn.clear()
        if not self._replay:
            self._base, self._given = self._encoded(), 0
        elif not again:
            # The attempt that counted took fewer than one before it. They come next, but the RNG has moved on.
            self._replay = collections.deque(_Drawn(left.batch, None) for left in self._replay)

    def rollback(self) -> None:
        """Batches drawn since `begin_step` will be given again, in the same order."""
        self._again = True
        if self._drawn:
            self._given -= len(self._drawn)
            self._replay.extendleft(reversed(self._drawn))
            self._drawn.clear()
        elif self._source.kind == "stateful" and not self._replay and self._encoded() != self._base:
            # The script draws from the object by its own hand.
            self._go_to(self._base, 0)

    # ---------------------------------------------------------------- warm-up

    def hold(self) -> None:
        """The position to which `give_back` returns. Between steps only."""
        self._drawn.clear()
        self._held = self._encoded()
        self._since_hold = []

    def give_back(self) -> None:
        """Everything drawn since `hold` counts as never drawn. Raises ValueError without a `hold`."""
        if self._held is None:
            raise ValueError(f"{self.name}: give_back without hold")
        held, self._held = self._held, None
        if self._source.rewinds:
            self._go_to(held, 0)
        else:
            self._source.unread(self._since_hold)
            self._forget()
        self._since_hold = []

    # ---------------------------------------------------------------- hand-over

    def state(self) -> Any:
        """The position, as nested lists and dicts."""
        if self._replay:
            return {"kind": self._source.kind, "at": self._base, "then": self._given}
        return {"kind": self._source.kind, "at": self._encoded(), "then": 0}

    def load(self, state: Any) -> None:
        """Go to this position; the RNG is left as it was. Raises StateMismatch."""
        try:
            kind, at, then = state["kind"], bytes(state["at"]), int(state["then"])
        except (TypeError, LookupError, ValueError) as error:
            raise StateMismatch(f"{self.name}: malformed position: {error!r}") from error
        if kind != self._source.kind:
            raise StateMismatch(f"{self.name}: the position is that of a {kind} source, here it is a {self._source.kind} one")
        self._go_to(at, then)

    def _go_to(self, at: bytes, then: int) -> None:
        with rng.undisturbed():
            try:
                self._source.load(tree.decode(at, self.name))
                for _ in range(then):
                    self._source.draw()
            except (TypeError, LookupError, ValueError, StopIteration) as error:
                if isinstance(error, StateMismatch):
                    raise
                raise StateMismatch(f"{self.name}: cannot go to the position: {error!r}") from error
            self._forget()  # asking for a position may draw, too: a StatefulDataLoader opens an iterator for it

    def _forget(self) -> None:
        self._drawn.clear()
        self._replay.clear()
        self._base, self._given = self._encoded(), 0

    def _encoded(self) -> bytes:
        return tree.encode(self._source.state(), self.name)

    # ---------------------------------------------------------------- role

    def parts(self) -> list[Any]:
        """What the user gave, and the samplers and the dataset in it."""
        return self._source.parts()

    @property
    def changes_role(self) -> bool:
        """Whether `set_role` to another rank can work in place."""
        return self._source.knows_role or bool(self._tellable())

    def require_movable(self) -> None:
        """Raises TrackRefused if no standby, which rehearses as another rank, could ever take this source over."""
        if self._role[1] > 1 and not self.changes_role:
            kind = type(self.parts()[0]).__name__
            raise TrackRefused(
                f"cannot track {self.name}: nothing tells this {kind} which rank it serves, so a standby could not take it over "
                f"and a lost rank could not be replaced; {self._remedy()}"
            )

    def _remedy(self) -> str:
        first = "an iterator cannot start again: " if self._source.kind == "one-shot" else ""
        return (
            f"{first}track a function data(position, rank), use a DataLoader with a DistributedSampler, or give the object (a "
            "dataset, too) a method set_role(rank, world_size) (with nothing to do in it if every rank sees the same)"
        )

    def _tellable(self) -> list[Any]:
        """Parts that take the role: by `set_role`, or as a DistributedSampler that was made for this very role."""
        return [part for part in self._source.parts() if callable(getattr(part, "set_role", None)) or self._samples(part)]

    def _samples(self, part: Any) -> bool:
        return (getattr(part, "rank", None), getattr(part, "num_replicas", None)) == self._role

    def set_role(self, rank: int, world_size: int) -> None:
        """`load` must follow if it is another role than before. Raises TrackRefused if the source was made for another rank
        and cannot be told."""
        if (rank, world_size) == self._role:
            return
        if not self.changes_role:
            raise TrackRefused(
                f"{self.name} was made for rank {self._role[0]} and cannot become that of rank {rank} in place: {self._remedy()}"
            )
        for part in self._tellable():
            if callable(getattr(part, "set_role", None)):
                part.set_role(rank, world_size)
            elif world_size != self._role[1]:
                raise TrackRefused(f"{self.name}: a sampler for {self._role[1]} ranks cannot become one for {world_size}")
            else:
                part.rank = rank
        self._role = (rank, world_size)
        self._source.restart()
        self._forget()
