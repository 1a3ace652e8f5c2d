"""Ballots combine in any order to the same result, and their bytes are checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd_worker.core.ballot import BALLOT_BYTES, Ballot, tree_children, tree_parent

ballots = st.builds(
    Ballot.single,
    epoch=st.integers(0, 3),
    step=st.integers(0, 3),
    plan=st.integers(0, 2),
    staged=st.booleans(),
    ready=st.booleans(),
)


@given(ballots, ballots, ballots)
def test_combining_is_associative_and_commutative(a: Ballot, b: Ballot, c: Ballot) -> None:
    assert a.combine(b).combine(c) == a.combine(b.combine(c))
    assert a.combine(b) == b.combine(a)


@given(ballots)
def test_bytes_and_back(ballot: Ballot) -> None:
    data = ballot.pack()
    assert len(data) == BALLOT_BYTES
    assert Ballot.unpack(data) == ballot


def test_a_ballot_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="ballot of 3 bytes"):
        Ballot.unpack(b"abc")


def test_a_rank_that_knows_no_plan_prevents_the_flip() -> None:
    knows = Ballot.single(epoch=0, step=4, plan=7, staged=True, ready=True)
    does_not = Ballot.single(epoch=0, step=4)
    assert knows.flips(7, 1)
    assert not knows.combine(does_not).flips(7, 1)


@given(st.integers(1, 40))
def test_the_tree_reaches_every_rank_once(size: int) -> None:
    children = [child for rank in range(size) for child in tree_children(rank, size)]
    assert sorted(children) == list(range(1, size))
    assert all(tree_parent(child) == rank for rank in range(size) for child in tree_children(rank, size))
    assert tree_parent(0) is None
