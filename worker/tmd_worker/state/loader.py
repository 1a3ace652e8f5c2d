"""The position of this rank in its data. Contract: no batch is skipped, none is seen twice, whatever is discarded, handed
over or warmed up; a batch that a discarded step drew is given again with the RNG state that drawing it left behind."""

from __future__ import annotations

from typing import Any


class LoaderCursor:
    """One tracked source of data: a DataLoader, an object with iteration and state_dict/load_state_dict, any iterable, or a
    function `data(position, rank)`; epochs follow one another without end."""

    #: Whether `set_role` to another rank can work in place.
    changes_role: bool

    def __init__(self, name: str, source: Any) -> None: ...

    def next(self) -> Any:
        """The next batch. Raises DataExhausted if the source has ended and cannot start again."""

    def begin_step(self) -> None:
        """What was drawn so far is used; what is drawn from here on can be rolled back."""

    def rollback(self) -> None:
        """Batches drawn since `begin_step` will be given again, in the same order."""

    def hold(self) -> None:
        """The position to which `give_back` returns."""

    def give_back(self) -> None:
        """Everything drawn since `hold` counts as never drawn."""

    def state(self) -> Any:
        """The position, as nested lists and dicts."""

    def load(self, state: Any) -> None:
        """Go to this position; the RNG is left as it was. Raises StateMismatch."""

    def set_role(self, rank: int, world_size: int) -> None:
        """Raises TrackRefused if the source was made for another rank and cannot be told."""
