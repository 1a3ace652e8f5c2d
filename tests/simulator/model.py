"""The training state as integers: a hash chain in which any difference in order, membership or input shows for ever.

Contract: `Chain` is the undisturbed run. The parameters before step k + 1 are a hash of those before k and of every rank's
contribution to k; a contribution is a hash of the parameters and of the rank's private state (loader position and RNG).
"""

from __future__ import annotations

import dataclasses

PRIVATE_LOST = 77


@dataclasses.dataclass(slots=True)
class TrainingState:
    """One rank's state before `step`."""

    step: int
    params: int
    private: int


def first_private(seed: int, rank: int) -> int:
    return hash((seed, 2, rank))


def build_contribution(seed: int, rank: int) -> int:
    return hash((seed, 3, rank))


def first_params(contributions: tuple[int, ...]) -> int:
    return hash((1, contributions))


def draw(private: int) -> int:
    """The private state after the batch of a step was drawn."""
    return hash((private, 5))


def contribution(params: int, private: int, rank: int) -> int:
    """The gradient (and the loss) of one rank, after its batch was drawn."""
    return hash((params, private, rank))


def apply(params: int, contributions: tuple[int, ...]) -> int:
    return hash((params, contributions))


def approximate_private(params: int, rank: int) -> int:
    """What a joiner takes for private state when nobody has its record any more."""
    return hash((params, PRIVATE_LOST, rank))


class Chain:
    """The run as it must be from `step` on: params[k] and private[k][rank] before step k."""

    def __init__(self, step: int, params: int, private: tuple[int, ...]) -> None:
        self.first_step = step
        self._params = [params]
        self._private = [private]
        self._contributions: list[tuple[int, ...]] = []

    @classmethod
    def of_job(cls, seed: int, world_size: int) -> Chain:
        ranks = range(world_size)
        built = tuple(build_contribution(seed, rank) for rank in ranks)
        return cls(0, first_params(built), tuple(first_private(seed, rank) for rank in ranks))

    def params(self, step: int) -> int:
        self._reach(step)
        return self._params[step - self.first_step]

    def private(self, step: int) -> tuple[int, ...]:
        self._reach(step)
        return self._private[step - self.first_step]

    def contributions(self, step: int) -> tuple[int, ...]:
        self._reach(step + 1)
        return self._contributions[step - self.first_step]

    def _reach(self, step: int) -> None:
        while self.first_step + len(self._params) <= step:
            drawn = tuple(draw(private) for private in self._private[-1])
            given = tuple(contribution(self._params[-1], private, rank) for rank, private in enumerate(drawn))
            self._contributions.append(given)
            self._private.append(drawn)
            self._params.append(apply(self._params[-1], given))
