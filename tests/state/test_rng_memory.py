"""A generator that was drawn from is seen in its memory, and one that was not is not asked for its state again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tmd_worker.state import generators, records, rng, rng_memory
from tmd_worker.state.tracked import Tracked


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generators, "tracked", {})  # those of other tests live as long as the process
    with rng.undisturbed():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        yield


def half_a_pair() -> None:
    """Draws no word: the first normal has left its twin behind."""
    words = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    np.random.standard_normal()
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == words


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, half a pair": lambda: random.gauss(0, 1),
    "numpy": np.random.random_sample,
    "numpy, half a pair": half_a_pair,
    "torch": lambda: torch.rand(1),
}


@pytest.fixture
def halfway() -> None:
    """One normal of a pair has been drawn from each."""
    random.gauss(0, 1)
    np.random.standard_normal()


@pytest.mark.usefixtures("halfway")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_going_back_as_well(draw: Callable[[], object]) -> None:
    before = rng.capture()
    assert rng.capture() is before
    draw()
    after = rng.capture()
    assert after is not before
    assert rng.encode(after) != rng.encode(before)
    rng.restore(before)
    assert rng.encode(rng.capture()) == rng.encode(before)
    draw()
    assert rng.encode(rng.capture()) == rng.encode(after)


def test_what_is_captured_is_what_the_generators_say_after_any_draws() -> None:
    """Words are made anew every 624 draws: over several times as many, nothing stale is returned."""
    choice = random.Random(7)
    for _ in range(3000):
        choice.choice(list(DRAWS.values())[:3])()
        if choice.random() < 0.1:
            state = rng.capture()
            assert state.python == random.getstate()
            assert state.numpy_global[1].tobytes() == np.random.get_state(legacy=False)["state"]["key"].tobytes()
            assert state.numpy_global[2] == np.random.get_state(legacy=False)["state"]["pos"]
            assert torch.equal(state.torch_cpu, torch.get_rng_state())


def test_generators_that_are_tracked_are_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = np.random.default_rng(1)
    with monkeypatch.context() as patch:
        patch.setitem(generators.tracked, "own", own)
        before = rng.capture()
        own.random()
        assert rng.encode(rng.capture()) != rng.encode(before)


def test_another_bit_generator_says_nothing_and_is_captured_all_the_same() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        assert rng_memory.look() is None
    finally:
        np.random.set_bit_generator(before)
    assert rng_memory.look() is not None


def test_where_memory_does_not_tell_every_capture_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng_memory, "_tells", lambda: False)
    assert rng_memory.look() is None
    first, second = rng.capture(), rng.capture()
    assert first is not second
    assert rng.encode(first) == rng.encode(second)


def test_the_record_of_an_undisturbed_step_does_not_encode_the_generators_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def encode(state: rng.RngState) -> bytes:
        encoded.append(state)
        return real(state)

    real = rng.encode
    monkeypatch.setattr(records.rng, "encode", encode)
    tracked = Tracked()
    tracked.set_role(0, 1)
    first = tracked.record(0)
    assert tracked.tail(0) is None
    tracked.record(1)
    assert len(encoded) == 1
    torch.rand(1)
    assert tracked.tail(1) is not None
    assert len(encoded) == 2
    assert tracked.record(2) != first
