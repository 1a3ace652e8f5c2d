"""The vote comes before any parameter changes, and what cannot be made safe is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tmd_worker.discard import StepDiscarded
from tmd_worker.optimizers import OptimizerRefused, Optimizers


class Recorder:
    """Stands for the session: writes down what it is told, in order."""

    made: list[Recorder] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.events: list[str] = []
        self.verdict = True
        self.late = False
        self.optimizers = Optimizers(
            vote=self.vote,
            applied=lambda: self.events.append("applied"),
            save=lambda optimizer: self.events.append(f"save {type(optimizer).__name__}"),
            late_backward=lambda: self.late,
        )

    def vote(self) -> None:
        self.events.append("vote")
        if not self.verdict:
            raise StepDiscarded


@pytest.fixture(autouse=True)
def no_body_left_open() -> Iterator[None]:
    """The hook for optimizers that were not tracked is global."""
    yield
    while Recorder.made:
        Recorder.made.pop().optimizers.discard()


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    return model


def test_the_vote_comes_after_every_other_pre_hook_even_one_that_was_added_later() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", optimizer, undo=False)
    optimizer.register_step_pre_hook(lambda *_: recorder.events.append("clip"))
    recorder.optimizers.begin_step(shadow=False)
    optimizer.step()
    assert recorder.events == ["clip", "vote", "applied"]


def test_a_step_that_is_not_to_be_applied_leaves_the_parameters_untouched() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recorder.optimizers.attach("adam", optimizer, undo=False)
    recorder.verdict = False
    before = model.weight.detach().clone()
    recorder.optimizers.begin_step(shadow=False)
    with pytest.raises(StepDiscarded):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert not optimizer.state


def test_two_optimizers_after_all_backwards_need_one_vote_and_no_undo() -> None:
    recorder, model = Recorder(), model_with_gradients()
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    recorder.optimizers.attach("first", first, undo=False)
    recorder.optimizers.attach("second", second, undo=False)
    recorder.optimizers.begin_step(shadow=False)
    first.step()
    second.step()
    recorder.optimizers.end_step()
    assert recorder.events == ["vote", "applied", "applied"]


def test_an_optimizer_with_undo_is_saved_and_the_last_one_votes() -> None:
    recorder, model = Recorder(), model_with_gradients()
    first, last = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)
    recorder.optimizers.attach("first", first, undo=True)
    recorder.optimizers.attach("last", last, undo=False)
    recorder.optimizers.begin_step(shadow=False)
    first.step()
    last.step()
    assert recorder.events == ["save SGD", "vote", "applied"]


def test_a_backward_after_the_vote_is_refused_by_the_next_optimizer_and_by_the_end_of_the_step() -> None:
    recorder, model = Recorder(), model_with_gradients()
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    recorder.optimizers.attach("generator", first, undo=False)
    recorder.optimizers.attach("discriminator", second, undo=False)
    recorder.optimizers.begin_step(shadow=False)
    first.step()
    recorder.late = True
    with pytest.raises(OptimizerRefused, match="track generator with undo=True"):
        second.step()
    with pytest.raises(OptimizerRefused, match="were not reduced"):
        recorder.optimizers.end_step()


def test_shadow_steps_do_not_vote() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", optimizer, undo=False)
    recorder.optimizers.begin_step(shadow=True)
    optimizer.step()
    assert recorder.events == []


def test_a_closure_is_refused() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", optimizer, undo=False)
    recorder.optimizers.begin_step(shadow=True)
    with pytest.raises(OptimizerRefused, match="closure"):
        optimizer.step(lambda: 0.0)


def test_an_optimizer_that_steps_inside_backward_is_refused() -> None:
    recorder, model = Recorder(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", optimizer, undo=False)
    recorder.optimizers.begin_step(shadow=False)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(OptimizerRefused, match="inside backward"):
        model(torch.ones(1, 4)).sum().backward()
    assert recorder.events == []


def test_an_optimizer_that_steps_outside_a_step_is_refused() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", optimizer, undo=False)
    with pytest.raises(OptimizerRefused, match="outside `with step:`"):
        optimizer.step()


def test_a_discard_forgets_what_a_scaler_lent_a_fused_optimizer() -> None:
    recorder, model = Recorder(), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder.optimizers.attach("adam", optimizer, undo=False)
    recorder.verdict = False
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    recorder.optimizers.begin_step(shadow=False)
    with pytest.raises(StepDiscarded):
        scaler.step(optimizer)
    assert hasattr(optimizer, "grad_scale")
    recorder.optimizers.discard()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_that_was_not_tracked_is_refused_before_it_steps() -> None:
    recorder, model = Recorder(), model_with_gradients()
    known, stranger = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sgd", known, undo=False)
    before = model.weight.detach().clone()
    recorder.optimizers.begin_step(shadow=True)
    with pytest.raises(OptimizerRefused, match=r"Adam\.step\(\) was called, but session\.track was not told of this Adam"):
        stranger.step()
    assert torch.equal(model.weight, before)
    known.step()
    recorder.optimizers.end_step()
    stranger.step()


class Sharded(torch.optim.SGD):
    """Steps by an optimizer of its own, as ZeroRedundancyOptimizer does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.optim.SGD(self.param_groups[0]["params"], lr=0.1).step()


def test_the_inner_optimizer_of_a_tracked_one_may_step() -> None:
    recorder, model = Recorder(), model_with_gradients()
    optimizer = Sharded(model.parameters(), lr=0.1)
    recorder.optimizers.attach("sharded", optimizer, undo=False)
    recorder.optimizers.begin_step(shadow=False)
    optimizer.step()
    assert recorder.events == ["vote", "applied"]
