"""Which DataLoader iterators the script draws from in one step after another: those carry a position, an evaluation's do not.

What tmd draws itself, from data that is tracked, is left out.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tmd_worker.state import sources


class Draws:
    """Use as a context manager around the shadow steps; `next_step` before each."""

    def __init__(self) -> None:
        self._step = -1
        #: By id: the iterator and the step in which it began, -1: before the first.
        self._began: dict[int, tuple[Any, int]] = {}
        #: Drawn from in a later step than that in which they began.
        self._carried: dict[int, Any] = {}

    def __enter__(self) -> Draws:
        self._plain = plain = _BaseDataLoaderIter.__next__

        @functools.wraps(plain)
        def noted(iterator: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__") != sources.__name__:
                self._note(iterator)
            return plain(iterator)

        _BaseDataLoaderIter.__next__ = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        _BaseDataLoaderIter.__next__ = self._plain  # type: ignore[method-assign]

    def next_step(self) -> None:
        self._step += 1

    def _note(self, iterator: Any) -> None:
        began = self._step if iterator._num_yielded == 0 else -1
        _, began = self._began.setdefault(id(iterator), (iterator, began))
        if began != self._step:
            self._carried[id(iterator)] = iterator

    def carried(self, loader: DataLoader[Any]) -> bool:
        """Whether an iterator of this loader goes on from step to step."""
        index_sampler = loader._index_sampler
        return any(i._dataset is loader.dataset and i._index_sampler is index_sampler for i in self._carried.values())
