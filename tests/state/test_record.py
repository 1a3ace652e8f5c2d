"""The record of small state: deterministic bytes, any damage seen, tails that belong to one record only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.record import Item, Record, changes, decode, digest_of, encode, infer_tail, patched

ITEMS = st.builds(
    Item,
    dtype=st.sampled_from(["tree", "float32", "uint8"]),
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    data=st.binary(max_size=100),
)
RECORDS = st.builds(Record, step=st.integers(-1, 2**40), items=st.dictionaries(st.text(max_size=8), ITEMS, max_size=6))


def item(data: bytes) -> Item:
    return Item("uint8", (len(data),), data)


@given(RECORDS)
@settings(max_examples=200, deadline=None)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    assert list(decode(data).items) == list(record.items)
    assert encode(decode(data)) == data


@given(RECORDS, st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_byte_is_seen(record: Record, data: st.DataObject) -> None:
    encoded = bytearray(encode(record))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StateMismatch):
        decode(bytes(encoded))


@given(RECORDS, st.data())
@settings(max_examples=100, deadline=None)
def test_a_truncated_or_longer_record_is_seen(record: Record, data: st.DataObject) -> None:
    encoded = encode(record)
    with pytest.raises(StateMismatch):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(StateMismatch):
        decode(encoded + b"x")


@given(RECORDS, st.dictionaries(st.text(max_size=8), ITEMS, max_size=6))
@settings(max_examples=200, deadline=None)
def test_record_and_tail_give_the_items_after(record: Record, after: dict[str, Item]) -> None:
    encoded = encode(record)
    tail = changes(record, encoded, after)
    if tail is None:
        assert record.items == after
    else:
        assert patched(record, encoded, decode(encode(tail))) == after


def test_a_tail_of_another_record_is_refused() -> None:
    first, second = Record(3, {"a": item(b"1")}), Record(3, {"a": item(b"2")})
    tail = changes(first, encode(first), {"a": item(b"9")})
    assert tail is not None
    assert tail.base == digest_of(encode(first))
    with pytest.raises(StateMismatch, match="another record"):
        patched(second, encode(second), tail)


def test_an_item_that_was_equal_on_both_is_taken_from_the_replicas_tail() -> None:
    lost = Record(5, {"count": item(b"5"), "rng": item(b"mine"), "same": item(b"s")})
    replica = Record(5, {"count": item(b"5"), "rng": item(b"other"), "same": item(b"s")})
    after = {"count": item(b"6"), "rng": item(b"other"), "same": item(b"s")}
    items, unknown = infer_tail(lost, replica, after)
    assert items == {"count": item(b"6"), "rng": item(b"mine"), "same": item(b"s")}
    assert unknown == ()


def test_an_item_that_differed_and_changed_cannot_be_inferred() -> None:
    lost, replica = Record(5, {"rng": item(b"mine")}), Record(5, {"rng": item(b"other")})
    items, unknown = infer_tail(lost, replica, {"rng": item(b"moved")})
    assert items == {"rng": item(b"mine")}
    assert unknown == ("rng",)
