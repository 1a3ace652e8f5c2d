"""A state that does not fit is refused with the entry's name, on both sides, and nothing is half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.state.builds import build, run, warmed
from tests.state.handoff_rig import hand_over
from tmd_worker.state.errors import StateMismatch, TrackRefused
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.tracked import Tracked


def edited(**fields: Any) -> Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]]:
    return lambda manifest, tensors: (msgspec.structs.replace(manifest, **fields), tensors)


def with_entries(
    edit: Callable[[list[TensorEntry]], list[TensorEntry]],
) -> Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]]:
    return lambda manifest, tensors: (
        msgspec.structs.replace(manifest, entries=tuple(edit(list(manifest.entries)))),
        tensors,
    )


def replaced(index: int, **fields: Any) -> Any:
    def edit(entries: list[TensorEntry]) -> list[TensorEntry]:
        entries[index] = msgspec.structs.replace(entries[index], **fields)
        return entries

    return with_entries(edit)


def entry(name: str, count: int) -> TensorEntry:
    return TensorEntry(name, "float32", (count,), (), 4 * count, "cpu")


DAMAGES: dict[str, tuple[Any, str]] = {
    "missing parameter": (with_entries(lambda e: e[1:]), "model/0.weight is tracked here but missing"),
    "renamed parameter": (replaced(1, name="model/0.slope"), "model/0.bias is tracked here but missing"),
    "parameters swapped": (with_entries(lambda e: [e[1], e[0], *e[2:]]), "model/0.bias stands where model/0.weight"),
    "twice": (with_entries(lambda e: [*e, e[0]]), "model/0.weight: it is there twice"),
    "other type": (replaced(0, dtype="int32"), "model/0.weight has type 'int32' there and 'float32' here"),
    "other shape": (replaced(0, shape=(8, 16)), r"model/0.weight has shape \(8, 16\) there and \(16, 8\) here"),
    "other order": (replaced(0, order=(1, 16)), "model/0.weight has memory order"),
    "impossible order": (replaced(0, order=(3, 3)), "model/0.weight: it has the impossible memory order"),
    "unknown type": (replaced(0, dtype="float31"), "model/0.weight: it has the impossible type"),
    "negative shape": (replaced(0, shape=(-16, -8)), "model/0.weight: it has the impossible type or shape"),
    "wrong size": (replaced(0, size_bytes=4), "model/0.weight: it announces 4 bytes"),
    "extra entry": (with_entries(lambda e: [*e, entry("model/9.weight", 3)]), "model/9.weight is in the state but belongs"),
    "missing optimizer entry": (with_entries(lambda e: e[:-1]), "malformed.*exp_avg_sq"),
    "optimizer entry of another shape": (replaced(-1, shape=(2, 4)), r"exp_avg_sq has shape \(2, 4\)"),
    "beyond all reason": (with_entries(lambda e: [*e, entry("x", 1 << 40)]), "is the most for"),
    "structure": (edited(structure=b"\x91\xa1d"), "structure: malformed"),
    "structure of nothing": (edited(structure=b"\xc0"), "structure: malformed"),
    "record": (edited(record=b""), "too short to be one"),
    "step": (edited(step=9), "step 3 came"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_manifest_that_does_not_fit_is_refused_by_name_on_both_sides_and_nothing_changes(name: str) -> None:
    change, message = DAMAGES[name]
    source, target = build(0), warmed(1)
    run(source, 4)
    source.tracked.record(3)
    before = target.tracked.digest()
    received, heard = hand_over(source.tracked, target.tracked, step=4, change=change)
    assert isinstance(received, StateMismatch)
    assert isinstance(heard, StateMismatch)
    with pytest.raises(StateMismatch, match=message):
        raise received
    with pytest.raises(StateMismatch, match=message):
        raise heard
    assert target.tracked.intact
    assert target.tracked.digest() == before


def test_another_script_is_refused_by_name() -> None:
    source = build(0)
    run(source, 2)

    def other(change: Callable[[Tracked, nn.Module], None], model: nn.Module) -> BaseException:
        tracked = Tracked()
        tracked.set_role(0, 1)
        tracked.add("model", model)
        change(tracked, model)
        received, _ = hand_over(source.tracked, tracked, step=2)
        assert isinstance(received, StateMismatch)
        return received

    wide = nn.Sequential(nn.Linear(8, 32))
    assert "model/0.weight has shape (16, 8) there and (32, 8) here" in str(other(lambda t, m: None, wide))
    assert "optimizers differ: ['optimizer'] only there" in str(other(lambda t, m: t.add("average", average(m)), build(0).model))


def average(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model, use_buffers=True)


def test_hyperparameters_and_schedulers_of_another_kind_are_refused_by_name() -> None:
    source = build(0)
    other = build(0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    received, _ = hand_over(source.tracked, other.tracked, step=0)
    assert "optimizer: group 0 differs in the hyperparameters ['amsgrad', 'betas'" in str(received)
    other = build(0, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
    received, _ = hand_over(source.tracked, other.tracked, step=0)
    assert "scheduler differ: ['gamma', 'step_size'] only here" in str(received)


def test_weights_that_are_tied_on_one_side_alone_are_refused_by_name() -> None:
    def pair(*, tied: bool) -> Tracked:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tied:
            model[1].weight = model[0].weight
        tracked = Tracked()
        tracked.add("model", model)
        return tracked

    received, _ = hand_over(pair(tied=True), pair(tied=False), step=0)
    assert "model/1.weight is tracked here but missing in the state" in str(received)
    received, _ = hand_over(pair(tied=False), pair(tied=True), step=0)
    assert "model/1.weight stands where model/1.bias is expected" in str(received)


def released(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def test_a_state_whose_bytes_are_not_there_is_refused_by_name_and_not_read() -> None:
    """What became of it after it was tracked: read all the same, it would be other memory, or a crash."""
    offloaded, on_meta, sparse = build(0), build(0), build(0)
    for source in (offloaded, on_meta, sparse):
        run(source, 2)
    released(offloaded.model[0].weight.data)
    state = on_meta.optimizer.state[on_meta.model[0].weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    state = sparse.optimizer.state[sparse.model[0].weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].to_sparse()
    for source, message in (
        (offloaded, "hand over model/0.weight: its memory was released"),
        (on_meta, "optimizer/model/0.weight.exp_avg: it is on the meta device"),
        (sparse, "optimizer/model/0.weight.exp_avg_sq: it is not a plain strided tensor"),
    ):
        with pytest.raises(TrackRefused, match=message):
            source.tracked.full_state(step=2, epoch=0)
