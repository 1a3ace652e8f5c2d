"""Layers that are frozen at first and join the optimizer later, group by group, as the script goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.state.handoff_rig import hand_over
from tmd_worker.state import optim
from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.optim import OptimizerState
from tmd_worker.state.tracked import Tracked

THAWS_AT = 3


@dataclasses.dataclass
class Thawing:
    """From step THAWS_AT on the head is trained, too, in a group of its own."""

    tracked: Tracked
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]


def build(seed: int) -> Thawing:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    tracked = Tracked()
    tracked.set_role(0, 1)
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    tracked.add("data", lambda position, rank: torch.randn(3, 4, generator=torch.Generator().manual_seed(position)))

    def step(number: int) -> float:
        if number >= THAWS_AT and len(optimizer.param_groups) == 1:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 3e-3})
        batch = tracked.loaders["data"].next()
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Thawing(tracked, model, optimizer, step)


def weights(made: Thawing) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


@pytest.mark.parametrize("moves_at", [2, 3, 4, 6])
def test_a_joiner_that_has_thawed_nothing_goes_on_like_the_source(moves_at: int) -> None:
    calm = build(0)
    expected = [calm.step(number) for number in range(8)]
    source, joiner = build(0), build(1)
    losses = [source.step(number) for number in range(moves_at)]
    assert isinstance(hand_over(source.tracked, joiner.tracked, step=moves_at)[0], Manifest)
    losses += [joiner.step(number) for number in range(moves_at, 8)]
    assert losses == expected
    assert all(map(torch.equal, weights(joiner), weights(calm)))


def test_a_step_that_is_given_up_takes_its_thaw_back() -> None:
    calm, stormy = build(0), build(0)
    expected = [calm.step(number) for number in range(6)]
    losses = [stormy.step(number) for number in range(THAWS_AT)]
    snapshot = stormy.tracked.snapshot_small()
    before = [parameter.requires_grad for parameter in stormy.model.parameters()]
    stormy.model[2].requires_grad_(True)
    stormy.optimizer.add_param_group({"params": list(stormy.model[2].parameters()), "lr": 3e-3})
    stormy.tracked.restore_small(snapshot)
    assert len(stormy.optimizer.param_groups) == 1
    assert [parameter.requires_grad for parameter in stormy.model.parameters()] == before
    losses += [stormy.step(number) for number in range(THAWS_AT, 6)]
    assert losses == expected


def test_groups_that_cannot_be_made_here_are_refused_by_name() -> None:
    source = build(0)
    data = optim.describe("optimizer", source.optimizer, source.tracked.names, {}.__setitem__)
    state = OptimizerState("optimizer", data)
    without = {name: part for name, part in source.tracked.parameters.items() if name != "model/0.bias"}
    with pytest.raises(StateMismatch, match=r"steps 'model/0.bias', which is not tracked here"):
        state.check(source.optimizer, without, {})
    state.groups.append((["model/0.weight"], dict(state.groups[0][1])))
    with pytest.raises(StateMismatch, match="a parameter is in two groups"):
        state.check(source.optimizer, source.tracked.parameters, {})
