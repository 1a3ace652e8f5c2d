"""The kinds of data that can be tracked, each with a position that can be written down and gone to.

Contract of a source: `draw` gives the next batch, of the next epoch after the last (StopIteration: there is none any more);
`state` is the position as nested lists and dicts, `load` goes to one, disturbing the RNG freely (the caller protects it).
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe

from tmd_worker.state import rng
from tmd_worker.state.errors import StateMismatch, TrackRefused


class Source(Protocol):
    #: Goes into the state, so that a position is never given to another kind of source.
    kind: str
    #: `draw` after `load` repeats batches exactly, so nothing needs to be kept to give batches back.
    rewinds: bool
    #: It asks for the role each time, so that nothing needs to be told when the role changes.
    knows_role: bool

    def draw(self) -> Any: ...
    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...
    def unread(self, batches: list[Any]) -> None:
        """Only if it does not rewind: these, drawn last, count as not drawn."""

    def parts(self) -> list[Any]:
        """The objects that may want to know the epoch or the role."""
        ...

    def restart(self) -> None:
        """The role has changed: iterators made for the old one are dropped. `load` follows."""


def is_source(obj: Any) -> bool:
    """True for an iterable, an iterator or a function."""
    if isinstance(obj, (torch.nn.Module, torch.Tensor, str, bytes, dict, type)):
        return False
    return _iterates(obj) or (callable(obj) and not hasattr(obj, "state_dict"))


def source_for(name: str, obj: Any, role: Callable[[], tuple[int, int]]) -> Source:
    """`obj` is one by `is_source`. Raises TrackRefused if its order cannot be repeated."""
    if _iterates(obj) and hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"):
        return StatefulSource(obj)
    if isinstance(obj, DataLoader):
        _refuse_unrepeatable(name, obj)
        return RepeatableSource(name, obj)
    if hasattr(obj, "__next__"):
        return OneShotSource(name, obj)
    return RepeatableSource(name, obj) if _iterates(obj) else FunctionSource(name, obj, role)


def _iterates(obj: Any) -> bool:
    return hasattr(obj, "__iter__") or hasattr(obj, "__next__")


def _refuse_unrepeatable(name: str, loader: DataLoader[Any]) -> None:
    if not getattr(loader, "in_order", True):
        raise TrackRefused(
            f"cannot track {name}: in_order=False yields batches in an order that cannot be repeated; leave it out"
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise TrackRefused(
            f"cannot track {name}: an IterDataPipe agrees on its order by a collective; use a Dataset with a sampler"
        )


def set_epoch(parts: list[Any], epoch: int) -> None:
    for part in parts:
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


class RepeatableSource:
    """A DataLoader, or anything whose `iter` starts from the beginning: position is epoch and batches taken in it.

    What shuffles with the global RNG is repeated by starting the epoch's iterator from the RNG state in which it was started
    first. A DataLoader over a map-style dataset without workers skips indices; with workers the batches are made and dropped,
    since the workers' own RNG advances with what they load.
    """

    kind = "repeatable"
    rewinds = True
    knows_role = False

    def __init__(self, name: str, obj: Any) -> None:
        self._name = name
        self._obj = obj
        epochs = [part.epoch for part in self.parts() if isinstance(getattr(part, "epoch", None), int)]
        self._epoch = epochs[0] if epochs else 0
        self._taken = 0
        self._iterator: Iterator[Any] | None = None
        #: The global RNG and the user's generators when the epoch began.
        self._start: tuple[bytes, list[bytes]] | None = None

    def draw(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._open()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._taken == 0:
                    break
                self._epoch, self._taken, self._iterator, self._start = self._epoch + 1, 0, None, None
                continue
            self._taken += 1
            return batch
        raise StopIteration(f"{self._name} gives no batch at all in epoch {self._epoch}")

    def state(self) -> Any:
        start = self._start if self._taken else None
        return {"epoch": self._epoch, "taken": self._taken, "start": start, "generators": self._generator_states()}

    def load(self, state: Any) -> None:
        epoch, taken, start, generators = int(state["epoch"]), int(state["taken"]), state["start"], state["generators"]
        if len(generators) != len(self._generators()):
            raise StateMismatch(f"{self._name}: {len(generators)} generators there, {len(self._generators())} here")
        self.restart()
        self._epoch = epoch
        if taken:
            rng.restore(rng.decode(start[0]))
            self._set_generators(start[1])
            self._open()
            self._skip(taken)
            self._taken = taken
        self._set_generators(generators)

    def unread(self, batches: list[Any]) -> None:
        raise NotImplementedError("a source that rewinds takes nothing back")

    def parts(self) -> list[Any]:
        if not isinstance(self._obj, DataLoader):
            return [self._obj]
        batches = self._obj.batch_sampler
        inner = batches.sampler if isinstance(batches, BatchSampler) else None
        unique = {id(part): part for part in (self._obj, self._obj.sampler, batches, inner, self._obj.dataset)}
        return list(unique.values())

    def restart(self) -> None:
        self._taken, self._iterator, self._start = 0, None, None
        self._forget_workers()

    def _open(self) -> None:
        """Starts the epoch. Workers are new in each: persistent ones would carry their RNG over from all epochs before."""
        set_epoch(self.parts(), self._epoch)
        self._start = (rng.encode(rng.capture()), self._generator_states())
        self._forget_workers()
        self._iterator = iter(self._obj)

    def _forget_workers(self) -> None:
        if getattr(self._obj, "_iterator", None) is not None:
            self._obj._iterator = None

    def _generators(self) -> list[torch.Generator]:
        """The user's own generators, which go on from epoch to epoch."""
        found = [getattr(part, "generator", None) for part in self.parts()]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _generator_states(self) -> list[bytes]:
        return [bytes(generator.get_state().numpy()) for generator in self._generators()]

    def _set_generators(self, states: list[bytes]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _skip(self, count: int) -> None:
        iterator = self._iterator
        assert iterator is not None
        loader = self._obj
        cheap = (
            isinstance(loader, DataLoader)
            and loader.num_workers == 0
            and not isinstance(loader.dataset, IterableDataset)
            and hasattr(iterator, "_sampler_iter")
        )
        indices = iterator._sampler_iter if cheap else iterator  # type: ignore[attr-defined]
        for done in range(count):
            try:
                next(indices)
            except StopIteration:
                self.restart()
                raise StateMismatch(
                    f"{self._name}: the position is batch {count} of epoch {self._epoch}, but only {done} are to be had here; "
                    "is the dataset the same on every node?"
                ) from None
        if cheap:
            iterator._num_yielded += count  # type: ignore[attr-defined]


class OneShotSource:
    """An iterator: position is the number of batches taken, it only goes forward, and it ends."""

    kind = "one-shot"
    rewinds = False
    knows_role = False

    def __init__(self, name: str, obj: Any) -> None:
        self._name = name
        self._obj = obj
        self._taken = 0
        self._unread: collections.deque[Any] = collections.deque()

    def draw(self) -> Any:
        batch = self._unread.popleft() if self._unread else next(self._obj)
        self._taken += 1
        return batch

    def state(self) -> Any:
        return {"taken": self._taken}

    def load(self, state: Any) -> None:
        target = int(state["taken"])
        if target < self._taken:
            raise StateMismatch(
                f"{self._name}: the position is batch {target}, but this iterator is at {self._taken} and cannot go back; track "
                "something that can be iterated from its start, or that has state_dict and load_state_dict"
            )
        try:
            while self._taken < target:
                self.draw()
        except StopIteration:
            raise StateMismatch(f"{self._name}: the position is batch {target}, but it ended after {self._taken}") from None

    def unread(self, batches: list[Any]) -> None:
        self._unread.extendleft(reversed(batches))
        self._taken -= len(batches)

    def parts(self) -> list[Any]:
        return [self._obj]

    def restart(self) -> None:
        self._unread.clear()


class StatefulSource:
    """An object that knows its own position (`state_dict`, `load_state_dict`); its iterators go on from there."""

    kind = "stateful"
    rewinds = True
    knows_role = False

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self._epoch = int(obj.epoch) if isinstance(getattr(obj, "epoch", None), int) else 0
        self._iterator: Iterator[Any] | None = None
        #: What an iterator was loaded with that has not been drawn from: torchdata's, if it is asked before, has forgotten it.
        self._loaded: Any = None

    def draw(self) -> Any:
        self._loaded = None
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            return next(self._iterator)
        except StopIteration:
            if not hasattr(self._obj, "__iter__"):
                raise
        self._epoch += 1
        set_epoch(self.parts(), self._epoch)
        self._iterator = self._begin()
        return next(self._iterator)

    def _begin(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._obj) if hasattr(self._obj, "__iter__") else self._obj
        return iterator

    def state(self) -> Any:
        state = self._obj.state_dict() if self._loaded is None else self._loaded
        return {"epoch": self._epoch, "open": self._iterator is not None, "state": state}

    def load(self, state: Any) -> None:
        self._epoch = int(state["epoch"])
        set_epoch(self.parts(), self._epoch)
        self._obj.load_state_dict(state["state"])
        self._loaded = state["state"] if state["open"] else None
        # At once, not at the next draw: starting an iterator may draw from the RNG, which the source did long ago.
        self._iterator = self._begin() if state["open"] else None

    def unread(self, batches: list[Any]) -> None:
        raise NotImplementedError("a source that rewinds takes nothing back")

    def parts(self) -> list[Any]:
        found = [self._obj, *(getattr(self._obj, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        return list({id(part): part for part in found if part is not None}.values())

    def restart(self) -> None:
        self._iterator = self._loaded = None


class FunctionSource:
    """A function `data(position)`, `data(position, rank)` or `data(position, rank, world_size)`."""

    kind = "function"
    rewinds = True

    def __init__(self, name: str, obj: Any, role: Callable[[], tuple[int, int]]) -> None:
        try:
            wanted = [p for p in inspect.signature(obj).parameters.values() if p.default is p.empty]
        except (TypeError, ValueError):
            wanted = []
        if not 1 <= len(wanted) <= 3 or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted):
            raise TrackRefused(
                f"cannot track {name}: as a source of data a function takes (position), (position, rank) or "
                "(position, rank, world_size), position counting its batches from 0"
            )
        self.knows_role = len(wanted) >= 2
        self._obj = obj
        self._role = role
        self._count = len(wanted)
        self.position = 0

    def draw(self) -> Any:
        batch = self._obj(*(self.position, *self._role())[: self._count])
        self.position += 1
        return batch

    def state(self) -> Any:
        return {"taken": self.position}

    def load(self, state: Any) -> None:
        self.position = int(state["taken"])

    def unread(self, batches: list[Any]) -> None:
        raise NotImplementedError("a source that rewinds takes nothing back")

    def parts(self) -> list[Any]:
        return [self._obj]

    def restart(self) -> None:
        """Every batch is made from the position anew."""
