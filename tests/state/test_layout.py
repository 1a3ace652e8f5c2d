"""What a script has built is told in words, so that a standby that built something else is found before it gets a role."""

from __future__ import annotations

import pytest
import torch

from tests.state.builds import build
from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.layout import layout, require_same


def test_values_do_not_matter_and_everything_tracked_is_named() -> None:
    first, second = build(seed=0), build(seed=1)
    first.step()
    lines = layout(first.tracked)
    require_same(lines, layout(second.tracked))
    for word in ("parameter model/0.weight float32[16, 8]", "buffer model/1.running_mean", "AdamW with", "CosineAnnealingLR"):
        assert any(word in line for line in lines), word


def test_what_only_one_side_has_is_named() -> None:
    ours = build()
    theirs = layout(ours.tracked)
    ours.model.register_buffer("surplus", torch.zeros(3))
    with pytest.raises(StateMismatch, match=r"something else than the job's: buffer model/surplus float32\[3\] only here"):
        require_same(theirs, layout(ours.tracked))
    with pytest.raises(StateMismatch, match=r"surplus.* only there"):
        require_same(layout(ours.tracked), theirs)


def test_of_many_differences_a_few_are_listed() -> None:
    with pytest.raises(StateMismatch, match=r"a, b, c and 2 more only there"):
        require_same(["a", "b", "c", "d", "e", "same"], ["same"])


def test_another_order_is_another_build() -> None:
    with pytest.raises(StateMismatch, match="the same parts in another order"):
        require_same(["a", "b"], ["b", "a"])
