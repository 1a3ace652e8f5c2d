"""Generators of the user's own that are tracked belong to the RNG state: kept, rolled back, replayed and handed over with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tmd_worker.state import generators, rng, tree
from tmd_worker.state.errors import StateMismatch, TrackRefused
from tmd_worker.state.tracked import Tracked

MAKE: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(1, generator=g).item()),
    "numpy": (lambda seed: np.random.default_rng(seed), lambda g: g.standard_normal()),
    "numpy, other bits": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.random()),
    "numpy RandomState": (lambda seed: np.random.RandomState(seed), lambda g: g.normal()),
    "python": (lambda seed: random.Random(seed), lambda g: g.gauss(0, 1)),
}


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    generators.tracked.clear()


def tracked_with(noise: Any) -> Tracked:
    tracked = Tracked()
    tracked.set_role(0, 1)
    tracked.add("noise", noise)
    return tracked


@pytest.mark.parametrize("kind", MAKE)
def test_a_discarded_step_gives_back_what_it_drew(kind: str) -> None:
    make, draw = MAKE[kind]
    noise, calm = make(5), make(5)
    tracked = tracked_with(noise)
    drawn = []
    for _ in range(3):
        snapshot = tracked.snapshot_small()
        draw(noise)
        tracked.restore_small(snapshot)
        drawn.append(draw(noise))
    assert drawn == [draw(calm) for _ in range(3)]


@pytest.mark.parametrize("kind", MAKE)
def test_a_record_carries_it_to_another_process(kind: str) -> None:
    make, draw = MAKE[kind]
    here = make(5)
    draw(here)
    record = tracked_with(here).record(0)
    expected = [draw(here) for _ in range(3)]

    there = make(6)
    tracked_with(there).apply_record(record)
    assert [draw(there) for _ in range(3)] == expected


@pytest.mark.parametrize("kind", MAKE)
def test_a_batch_that_is_given_again_leaves_it_as_drawing_it_did(kind: str) -> None:
    """Data that draws by its own generator: the batch comes from memory, the generator goes on all the same."""
    make, draw = MAKE[kind]
    noise, calm = make(5), make(5)
    tracked = tracked_with(noise)
    tracked.add("data", lambda position: draw(noise))
    data = tracked.loaders["data"]
    snapshot = tracked.snapshot_small()
    data.next()
    tracked.restore_small(snapshot)
    assert [data.next(), data.next()] == [draw(calm), draw(calm)]


def test_a_record_of_other_generators_is_refused_and_changes_nothing() -> None:
    record = tracked_with(random.Random(1)).record(0)
    generators.tracked.clear()
    other = Tracked()
    other.set_role(0, 1)
    other.add("shuffle", random.Random(2))
    before = rng.encode(rng.capture())
    with pytest.raises(StateMismatch, match="generators there: noise; tracked here: shuffle"):
        other.apply_record(record)
    assert rng.encode(rng.capture()) == before


def test_a_state_of_another_kind_is_refused_and_changes_nothing() -> None:
    noise = np.random.default_rng(1)
    tracked_with(noise)
    state = rng.capture()
    before = tree.encode(generators.states(), "noise")
    foreign = rng.RngState(state.torch_cpu, None, state.numpy_global, state.python, {"noise": random.Random(1).getstate()[0]})
    with pytest.raises(StateMismatch, match="rng"):
        rng.decode(rng.encode(foreign))
    assert tree.encode(generators.states(), "noise") == before


def test_a_generator_without_a_state_cannot_be_tracked() -> None:
    with pytest.raises(TrackRefused, match="SystemRandom"):
        Tracked().add("noise", random.SystemRandom())
