"""The example's loader keeps the promise that the demo's verdict rests on: nothing skipped, nothing seen twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "gpt"


def load(name: str) -> ModuleType:
    """A file of the example under a name of its own: "model" and "corpus" are too common for sys.modules."""
    spec = importlib.util.spec_from_file_location(f"gpt_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus, model = load("corpus"), load("model")
#: Every byte value tells its window of 3 bytes: 0 0 0 1 1 1 2 2 2 …
TEXT = torch.arange(64, dtype=torch.uint8).repeat_interleave(3)


def batches(rank: int, world_size: int = 3, batch: int = 4) -> object:
    return corpus.Batches(TEXT, batch=batch, length=3, seed=7, rank=rank, world_size=world_size)


def windows(loader: object, count: int) -> list[int]:
    return [int(window[0]) for _ in range(count) for window in next(loader)[0]]  # type: ignore[call-overload]


def test_an_epoch_gives_every_window_to_one_rank_once() -> None:
    rounds = 63 // (3 * 4)
    seen = [window for rank in range(3) for window in windows(batches(rank), rounds)]
    assert len(seen) == len(set(seen)) == rounds * 3 * 4


def test_every_epoch_has_its_own_order() -> None:
    rounds = 63 // (3 * 4)
    loader = batches(0)
    assert windows(loader, rounds) != windows(loader, rounds)


def test_targets_are_the_bytes_that_follow() -> None:
    tokens, targets = next(batches(0))  # type: ignore[call-overload]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (targets[:, -1] == tokens[:, 0] + 1).all()


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 17])
def test_a_loader_that_takes_over_goes_on_exactly_there(steps: int) -> None:
    leaver, joiner = batches(1), batches(2)
    windows(leaver, steps)
    windows(joiner, 2)
    joiner.set_role(1, 3)  # type: ignore[attr-defined]
    joiner.load_state_dict(leaver.state_dict())  # type: ignore[attr-defined]
    assert windows(joiner, 9) == windows(leaver, 9)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="192 bytes are too few for 32 batches of 4 × 3"):
        batches(0, world_size=32)


def test_the_text_is_real_and_the_same_every_time() -> None:
    first, second = corpus.standard_library(100_000), corpus.standard_library(100_000)
    assert torch.equal(first, second)
    assert b"def __init__(self" in bytes(first.tolist())


def test_the_model_has_about_five_million_parameters_and_learns() -> None:
    assert 4.5e6 < sum(p.numel() for p in model.GPT(model.Shape()).parameters()) < 5.5e6
    torch.manual_seed(0)
    small = model.GPT(model.Shape(width=32, layers=1, heads=2, context=16))
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    loader = corpus.Batches(corpus.standard_library(50_000), batch=8, length=16, seed=1, rank=0, world_size=1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = small(*next(loader))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5.0
    assert sum(losses[-5:]) / 5 < 3.8
