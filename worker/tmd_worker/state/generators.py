"""Generators of the user's own that are tracked: torch.Generator, numpy's Generator and RandomState, random.Random.

Contract: they belong to the RNG state of the process (rng.capture, rng.restore): a batch that is given again leaves them as
drawing it did. Known by name for as long as the process lives.
"""

from __future__ import annotations

import array
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

#: Those that are tracked in this process.
tracked: dict[str, Generator] = {}


def is_generator(obj: object) -> bool:
    """False for random.SystemRandom, which has no state."""
    return isinstance(obj, Generator) and not isinstance(obj, random.SystemRandom)


def states() -> dict[str, Any]:
    """Of all that are tracked, as nested values."""
    return {name: state_of(generator) for name, generator in tracked.items()}


def restore(states_by_name: Mapping[str, Any]) -> None:
    """Raises ValueError if they are of other generators than the tracked ones, or malformed; then some may have been set."""
    if states_by_name.keys() != tracked.keys():
        there, here = ", ".join(states_by_name) or "none", ", ".join(tracked) or "none"
        raise ValueError(f"generators there: {there}; tracked here: {here}")
    for name, state in states_by_name.items():
        set_state(tracked[name], state)


def check(states_by_name: Mapping[str, Any]) -> None:
    """Raises as `restore` does, and leaves all as they are."""
    before = states()
    try:
        restore(states_by_name)
    finally:
        restore(before)


def state_of(generator: Generator) -> Any:
    """Numbers, arrays and tensors in nested tuples and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    version, words, gauss = generator.getstate()
    return version, array.array("I", words).tobytes(), gauss


def set_state(generator: Generator, state: Any) -> None:
    """Raises ValueError, TypeError or KeyError for a state of another kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, raw, gauss = state
        words = array.array("I")
        words.frombytes(raw)
        generator.setstate((version, tuple(words), gauss))
