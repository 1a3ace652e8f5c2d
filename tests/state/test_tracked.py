"""What is tracked is complete, comes back exactly after a discarded step and after the warm-up, and is refused if it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from tests.state.builds import BUILDS, Build, build, run
from tmd_worker.state.errors import StateUnusable, TrackRefused
from tmd_worker.state.tracked import Tracked


@pytest.fixture(params=BUILDS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Build]:
    return BUILDS[request.param]


# ---------------------------------------------------------------- warm-up and rollback


def test_the_warm_up_leaves_no_trace(make: Callable[[int], Build]) -> None:
    made = make(0)
    before = made.tracked.digest()
    snapshot = made.tracked.snapshot_all()
    run(made, 2)
    assert made.tracked.digest() != before
    made.tracked.restore_all(snapshot)
    assert made.tracked.digest() == before
    assert all(parameter.grad is None for parameter in made.model.parameters())

    plain = run(make(0), 12)
    again = make(0)
    snapshot = again.tracked.snapshot_all()
    run(again, 2)
    again.tracked.restore_all(snapshot)
    assert run(again, 12) == plain


def test_a_discarded_attempt_leaves_no_trace(make: Callable[[int], Build]) -> None:
    """Attempts are given up after the forward or the backward pass; the step that counts is that of an undisturbed run."""
    undisturbed = make(0)
    expected = run(undisturbed, 9)
    digest = undisturbed.tracked.digest()

    made = make(0)
    losses = []
    for number in range(9):
        snapshot = made.tracked.snapshot_small()
        for attempt in range(number % 3):
            (batch,) = made.tracked.loaders["data"].next()
            loss = made.model(batch).pow(2).mean()
            if attempt:
                loss.backward()
            made.optimizer.param_groups[0]["weight_decay"] = 0.5
            torch.rand(3), np.random.rand(), random.random()
            made.tracked.restore_small(snapshot)
        losses.append(made.step())
    assert losses == expected
    assert made.tracked.digest() == digest


def test_rollback_after_unscale_lets_the_scaler_unscale_again() -> None:
    made = build(scaled=True)
    scaler = made.tracked.scalers["scaler"]
    made.step()
    snapshot = made.tracked.snapshot_small()
    (batch,) = made.tracked.loaders["data"].next()
    scaler.scale(made.model(batch).pow(2).mean()).backward()
    scaler.unscale_(made.optimizer)
    made.tracked.restore_small(snapshot)
    made.step()


def test_buffers_that_a_step_replaces_adds_or_removes_come_back() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(3))
            self.register_buffer("none", None)
            self.register_buffer("gone", torch.ones(2), persistent=False)
            self.register_buffer("wide", torch.arange(3.0).view(3, 1).expand(3, 4))

    model = Odd()
    tracked = Tracked()
    tracked.add("model", model)
    kept, gone = model.kept, model.gone
    snapshot = tracked.snapshot_small()
    kept.add_(1)
    model.kept = model.kept + 5
    model.none = torch.ones(7)
    model.register_buffer("new", torch.ones(1))
    del model.gone
    tracked.restore_small(snapshot)
    assert model.kept is kept
    assert torch.equal(kept, torch.zeros(3))
    assert model.none is None
    assert model.gone is gone
    assert not hasattr(model, "new")
    assert torch.equal(model.wide, torch.arange(3.0).view(3, 1).expand(3, 4))


def test_undo_takes_back_an_optimizer_that_stepped_before_the_vote() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    one, two = torch.optim.Adam(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    tracked = Tracked()
    for name, obj in (("first", first), ("second", second), ("two", two)):
        tracked.add(name, obj)
    tracked.add("one", one, undo=True)

    def step_one() -> None:
        tracked.save_for_undo(one)
        first(torch.ones(2, 4)).sum().backward()
        one.step()

    for already_stepped in (False, True):
        before = tracked.digest()
        snapshot = tracked.snapshot_small()
        step_one()
        step_one()
        assert tracked.digest() != before
        tracked.restore_small(snapshot)
        assert tracked.digest() == before
        assert bool(one.state) is already_stepped
        tracked.snapshot_small()
        step_one()


def test_undo_of_what_was_not_saved_does_nothing() -> None:
    made = build()
    before = made.tracked.digest()
    made.tracked.undo(made.optimizer)
    assert made.tracked.digest() == before


# ---------------------------------------------------------------- records


def test_record_and_tail_carry_the_small_state_to_another_process() -> None:
    made, other = build(0), build(1)
    run(made, 5)
    record = made.tracked.record(4)
    assert made.tracked.tail(4) is None
    random.random()
    made.model[1].running_mean.add_(1)
    tail = made.tracked.tail(4)
    assert tail is not None
    assert len(tail) < len(record)
    wanted = made.tracked.digest()["small"]
    other.tracked.apply_record(record)
    assert other.tracked.digest()["small"] != wanted
    other.tracked.apply_tail(tail)
    assert other.tracked.digest()["small"] == wanted


def test_a_record_holds_large_buffers_too() -> None:
    def make(value: float) -> tuple[nn.Module, Tracked]:
        model = nn.Module()
        model.register_buffer("queue", torch.full((1 << 20,), value))
        tracked = Tracked()
        tracked.add("model", model)
        return model, tracked

    (_, source), (model, target) = make(1.0), make(0.0)
    target.apply_record(source.record(0))
    assert torch.equal(model.queue, torch.ones(1 << 20))


def test_equal_state_gives_equal_records() -> None:
    assert build(3).tracked.record(7) == build(3).tracked.record(7)


# ---------------------------------------------------------------- refusals


def refused(pattern: str, **objects: Any) -> None:
    tracked = Tracked()
    tracked.set_role(0, 1)
    *others, last = objects
    for name in others:
        tracked.add(name, objects[name])
    with pytest.raises(TrackRefused, match=pattern):
        tracked.add(last, objects[last])
    assert last not in {*tracked.modules, *tracked.optimizers, *tracked.loaders, *tracked.others}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def module_with(name: str, value: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer(name, value)
    return module


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_kept_is_refused_by_name() -> None:
    refused("thing.*int", thing=3)
    refused("opt.*LBFGS", opt=torch.optim.LBFGS([parameter()]))
    refused("net/weight.*not initialised", net=nn.LazyLinear(3))
    refused("net/weight.*meta", net=nn.Linear(2, 2, device="meta"))
    refused("net/mask.*not a plain strided tensor", net=module_with("mask", torch.eye(3).to_sparse()))
    refused("net/scale.*quantized", net=module_with("scale", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)))
    refused("callback.*position", callback=lambda a, b, c, d: None)
    refused("in_order=False", data=torch.utils.data.DataLoader([1, 2], num_workers=1, in_order=False))
    refused("a/b.*no '/'", **{"a/b": nn.Linear(1, 1)})


def test_a_sharded_parameter_is_refused_by_name() -> None:
    class Local(nn.Parameter):
        def to_local(self) -> torch.Tensor:
            return self.data

    net = nn.Module()
    net.weight = Local(torch.zeros(2))
    refused("net/weight.*sharded.*replicated data parallel", net=net)


def test_state_of_an_unknown_kind_is_refused_by_name() -> None:
    class Meter:
        def state_dict(self) -> Any:
            return {"window": [object()]}

        def load_state_dict(self, state: Any) -> None: ...

    refused(r"meter\.window\[0\].*object", meter=Meter())


def test_the_same_object_or_name_twice_is_refused() -> None:
    net = nn.Linear(2, 2)
    refused("copy: it is tracked as net", net=net, copy=net)
    tracked = Tracked()
    tracked.add("net", net)
    tracked.add("net", net)
    with pytest.raises(TrackRefused, match="net: the name is taken"):
        tracked.add("net", nn.Linear(2, 2))
    with pytest.raises(TrackRefused, match="undo=True"):
        tracked.add("other", nn.Linear(2, 2), undo=True)


def test_an_optimizer_whose_module_was_not_tracked_is_refused() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 3)
    tracked = Tracked()
    tracked.add("model", body)
    tracked.add("optimizer", torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1))
    with pytest.raises(TrackRefused, match=r"optimizer: its parameter 2 of group 0 \(shape \(3, 2\)\)"):
        tracked.snapshot_all()
    tracked.add("head", head)
    tracked.snapshot_all()


def test_a_scheduler_that_was_not_tracked_is_refused() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 3)
    tracked = Tracked()
    tracked.add("model", net)
    tracked.add("optimizer", optimizer)
    with pytest.raises(TrackRefused, match="scheduler drives optimizer but is not tracked"):
        tracked.snapshot_all()
    tracked.add("scheduler", schedule)
    tracked.snapshot_all()


# ---------------------------------------------------------------- wrappers and other objects


def test_ddp_and_compile_do_not_show_in_names(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        net = nn.Linear(2, 2)
        tracked = Tracked()
        tracked.add("model", DistributedDataParallel(torch.compile(net, backend="eager")))
        assert list(tracked.parameters) == ["model/weight", "model/bias"]
    finally:
        torch.distributed.destroy_process_group()


def test_shared_weights_count_once() -> None:
    made = build()
    names = list(made.tracked.parameters)
    assert "model/3.weight" in names
    assert "model/4.weight" not in names


def test_objects_with_state_roll_back_and_travel_with_the_record(caplog: pytest.LogCaptureFixture) -> None:
    class Meter:
        def __init__(self, size: int) -> None:
            self.seen: list[float] = []
            self.sums = torch.zeros(size)

        def state_dict(self) -> Any:
            return {"seen": self.seen, "sums": self.sums}

        def load_state_dict(self, state: Any) -> None:
            self.seen, self.sums = state["seen"], state["sums"]

    meter, other = Meter(3), Meter(3)
    tracked, target = Tracked(), Tracked()
    tracked.add("meter", meter)
    target.add("meter", other)
    snapshot = tracked.snapshot_small()
    meter.seen.append(1.0)
    meter.sums += 1
    tracked.restore_small(snapshot)
    assert meter.seen == []
    assert torch.equal(meter.sums, torch.zeros(3))
    meter.seen.append(2.0)
    target.apply_record(tracked.record(0))
    assert other.seen == [2.0]
    assert not caplog.records
    tracked.add("large", Meter(1 << 20))
    assert "large has 4.0 MiB" in caplog.text


def test_a_modules_extra_state_is_kept() -> None:
    class Counting(nn.Module):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    net, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    tracked, target = Tracked(), Tracked()
    tracked.add("model", net)
    target.add("model", other)
    snapshot = tracked.snapshot_small()
    net[0].calls = 5
    target.apply_record(tracked.record(0))
    tracked.restore_small(snapshot)
    assert net[0].calls == 0
    assert other[0].calls == 5


def test_nothing_can_be_read_while_a_hand_over_is_unfinished() -> None:
    source, target = build(0), build(1)
    manifest, _ = source.tracked.full_state(step=0, epoch=0)
    target.tracked.prepare_load(manifest, per_rank=True).begin()
    for use in (
        target.tracked.snapshot_small,
        target.tracked.snapshot_all,
        target.tracked.digest,
        lambda: target.tracked.record(0),
        lambda: target.tracked.full_state(step=0, epoch=0),
    ):
        with pytest.raises(StateUnusable, match="loaded again"):
            use()
