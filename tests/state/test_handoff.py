"""A state arrives bit for bit and ready to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.state.builds import BUILDS, Build, build, run, warmed
from tests.state.handoff_rig import hand_over
from tmd_worker.state import rng
from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.tracked import Tracked


@pytest.mark.parametrize("name", BUILDS)
def test_a_joiner_goes_on_exactly_as_the_leaver_would_have(name: str) -> None:
    make = BUILDS[name]
    undisturbed = make(0)
    expected = run(undisturbed, 13)

    leaver = make(0)
    losses = run(leaver, 7)
    with leaver.own_rng():
        joiner = make(1)
        snapshot = joiner.tracked.snapshot_all()
        run(joiner, 2)
        joiner.tracked.restore_all(snapshot, keep_allocated=True)
    received, _ = hand_over(leaver.tracked, joiner.tracked, step=7)
    assert isinstance(received, Manifest)
    assert (received.step, received.epoch) == (7, 3)
    assert joiner.tracked.digest() == leaver.tracked.digest()
    losses += run(joiner, 6)
    assert losses == expected
    assert joiner.tracked.digest() == undisturbed.tracked.digest()


def test_state_without_any_step_arrives() -> None:
    source, target = build(0), warmed(1)
    received, heard = hand_over(source.tracked, target.tracked, step=0)
    assert isinstance(received, Manifest)
    assert heard is None
    assert target.tracked.digest() == source.tracked.digest()
    assert not target.optimizer.state


def test_parameters_keep_their_memory_and_identity() -> None:
    source, target = build(0), warmed(1)
    run(source, 3)
    before = [(parameter, parameter.data_ptr()) for parameter in target.model.parameters()]
    hand_over(source.tracked, target.tracked, step=3)
    assert [(parameter, parameter.data_ptr()) for parameter in target.model.parameters()] == before


def test_parameters_whose_memory_has_gaps_are_copied_into() -> None:
    def make(value: float) -> tuple[nn.Module, Tracked]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((4, 8), value)[:, :4])
        tracked = Tracked()
        tracked.add("model", model)
        return model, tracked

    (_, source), (model, target) = make(2.0), make(0.0)
    received, _ = hand_over(source, target, step=0)
    assert isinstance(received, Manifest)
    assert torch.equal(model.weight, torch.full((4, 4), 2.0))
    assert model.weight.stride() == (8, 1)


def test_a_replica_gives_all_but_what_is_the_lost_ranks_own() -> None:
    """The lost rank's record has its RNG, position and buffers; the rest is the replica's."""
    lost = build(0)
    run(lost, 4)
    record = lost.tracked.record(3)
    after_vote = lost.tracked.digest()
    replica = build(0)
    run(replica, 4)
    replica.model[1].running_mean.add_(3)
    torch.rand(5)
    replica.tracked.record(3)
    joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.digest()["small"] != after_vote["small"]
    assert joiner.tracked.adopt_record(record, b"", received) == "exact"
    assert joiner.tracked.digest() == after_vote


def replicas_at_vote_and_after(tail: Callable[[Build], Any]) -> tuple[Build, Build, bytes]:
    """Two ranks with the same parameters and other buffers and RNG, at step 3's vote; the replica has done its tail."""
    lost = build(0)
    run(lost, 3)
    record = lost.tracked.record(3)
    replica = build(0)
    run(replica, 3)
    replica.model[1].running_mean.add_(3)
    torch.rand(3)
    replica.tracked.record(3)
    tail(replica)
    return lost, replica, record


def test_an_unknown_tail_is_assumed_to_do_what_it_did_on_the_replica() -> None:
    lost, replica, record = replicas_at_vote_and_after(lambda b: b.tracked.modules["average"].n_averaged.add_(1))
    with replica.own_rng():
        joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.adopt_record(record, None, received) == "assumed"
    lost.tracked.modules["average"].n_averaged.add_(1)
    assert joiner.tracked.digest() == lost.tracked.digest()


def test_an_unknown_tail_that_changed_what_differs_between_ranks_is_approximate() -> None:
    _, replica, record = replicas_at_vote_and_after(lambda b: b.model[1].running_mean.add_(1))
    joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.adopt_record(record, None, received) == "approximate"


def test_without_a_record_the_replicas_buffers_and_position_are_taken_and_said_to_be_approximate() -> None:
    replica, joiner = build(0), warmed(1)
    run(replica, 5)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=5, per_rank=False)
    assert isinstance(received, Manifest)
    before = rng.encode(rng.capture())
    assert joiner.tracked.adopt_record(None, None, received) == "approximate"
    assert rng.encode(rng.capture()) == before
    assert joiner.tracked.loaders["data"].state() == replica.tracked.loaders["data"].state()
    assert torch.equal(joiner.model[1].running_mean, replica.model[1].running_mean)


def test_a_record_of_another_step_is_refused_and_changes_nothing() -> None:
    replica, joiner = build(0), warmed(1)
    run(replica, 5)
    old = replica.tracked.record(3)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=5, per_rank=False)
    assert isinstance(received, Manifest)
    before = joiner.tracked.digest()
    with pytest.raises(StateMismatch, match=r"step 3 came.*step 4"):
        joiner.tracked.adopt_record(old, b"", received)
    assert joiner.tracked.digest() == before


def test_buffers_that_the_first_step_makes_arrive_at_a_joiner_that_was_reset() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", x.detach().sum())
            return self.weight * self.cache

    def make() -> tuple[Lazy, Tracked]:
        model, tracked = Lazy(), Tracked()
        tracked.add("model", model)
        snapshot = tracked.snapshot_all()
        model(torch.full((1,), 9.0))
        tracked.restore_all(snapshot)
        return model, tracked

    (model, source), (joiner, target) = make(), make()
    model(torch.full((1,), 7.0))
    received, _ = hand_over(source, target, step=1)
    assert isinstance(received, Manifest)
    assert joiner.cache == 7
