"""Nested values come back exactly, or are refused by name."""

from __future__ import annotations

import collections
import math
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tmd_worker.state import tree
from tmd_worker.state.errors import StateMismatch, TrackRefused

#: Also halves of surrogate pairs, which names of files have that are not UTF-8.
LETTERS = st.characters(exclude_categories=())
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(LETTERS) | st.binary() | st.complex_numbers()
KEYS = st.text(LETTERS, max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equal in type, order and every bit of a float."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    return a == b


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_any_nesting_comes_back_exactly(value: object) -> None:
    data = tree.encode(value, "x")
    assert same(tree.decode(data, "x"), value)
    assert tree.encode(tree.decode(data, "x"), "x") == data


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]),
        torch.randn(4, 4).t(),
    ],
)
def test_tensors_travel_inline(value: torch.Tensor) -> None:
    back = tree.decode(tree.encode({"t": value}, "x"), "x")["t"]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)


def test_numpy_counters_and_torch_types_keep_their_type() -> None:
    value = {
        "scalar": np.float64(math.pi),
        "array": np.arange(4, dtype=">i2"),
        "milestones": collections.Counter({5: 2}),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "shape": torch.Size([2, 3]),
        "frozen": frozenset({1, 2}),
    }
    back = tree.decode(tree.encode(value, "x"), "x")
    assert {name: type(part) for name, part in back.items()} == {name: type(part) for name, part in value.items()}
    assert np.array_equal(back.pop("array"), value.pop("array"))
    assert back == value


def test_equal_sets_give_equal_bytes() -> None:
    """8 and 16 fall into the same bucket of a small set, so the order of insertion shows when it is iterated."""
    one, other = {8, 16}, {16, 8}
    assert list(one) != list(other)
    assert tree.encode(one, "x") == tree.encode(other, "x")


def test_what_is_no_utf_8_comes_back_and_cannot_name_a_tensor() -> None:
    value = {os.fsdecode(b"caf\xe9"): [os.fsdecode(b"\xff"), "\u00e9"]}
    assert tree.decode(tree.encode(value, "x"), "x") == value
    with pytest.raises(TrackRefused, match=r"cannot track 'x.\\udcff': the name of a tensor must be UTF-8"):
        tree.encode({"\udcff": torch.ones(1)}, "x", {}.__setitem__)


def test_what_has_no_form_is_refused_by_name() -> None:
    with pytest.raises(TrackRefused, match=r"sampler\.inner\[1\].*Event"):
        tree.encode({"inner": [1, __import__("threading").Event()]}, "sampler")
    with pytest.raises(TrackRefused, match="Sub"):
        tree.encode(type("Sub", (dict,), {})(), "x")


def test_a_cycle_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TrackRefused, match="contain itself"):
        tree.encode(loop, "x")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused_or_harmless(data: bytes) -> None:
    try:
        tree.decode(data, "x")
    except StateMismatch:
        pass


@pytest.mark.parametrize(
    "node",
    [
        ["?"],
        ["x", "float32", [4], b"123"],
        ["r", "nowhere"],
        ["a", "O", [1], b"12345678"],
        ["d", "k"],
        {},
        [],
        ["i", "x"],
        ["D", "q"],
    ],
)
def test_malformed_nodes_are_refused(node: object) -> None:
    import msgspec

    with pytest.raises(StateMismatch, match="thing: malformed"):
        tree.decode(msgspec.msgpack.encode(node), "thing")
