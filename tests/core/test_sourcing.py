"""Who joins gets living sources apart from what failed, and no source more than its share."""

from __future__ import annotations

import collections
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tmd.core.sourcing import LEAST, MOST, choose, nearness


def test_nobody_on_the_node_of_a_lost_rank_is_asked_while_there_is_another() -> None:
    living = {0: "n0", 1: "n0", 2: "n1", 3: "n2"}
    assert set(choose([4], living, {"n0": math.inf}, 0)[4]) == {2, 3}
    assert set(choose([4], {0: "n0", 1: "n0"}, {"n0": math.inf}, 0)[4]) == {0, 1}


def test_another_rack_than_the_lost_node_s_is_preferred_if_two_ranks_live_there() -> None:
    nodes = {node: {"rack": rack, "zone": "z1"} for node, rack in {"n0": "r1", "n1": "r1", "n2": "r2", "n3": "r3"}.items()}
    near = nearness(nodes, {"n0"})
    assert near == {"n0": math.inf, "n1": 2, "n2": 1, "n3": 1}
    assert set(choose([0], {1: "n1", 2: "n2", 3: "n3"}, near, 0)[0]) == {2, 3}
    assert set(choose([0], {1: "n1", 2: "n2"}, near, 0)[0]) == {1, 2}, "one source alone would be lost with its node"
    assert set(choose([0], {1: "n1", 4: "n0"}, near, 0)[0]) == {1}


def test_a_failed_node_that_is_not_known_has_no_domain() -> None:
    assert nearness({"n1": {"rack": "r1"}}, {"n9"}) == {"n1": 0, "n9": math.inf}


def test_one_rank_of_each_node_comes_before_a_second_one_of_any() -> None:
    living = {0: "n0", 1: "n0", 2: "n0", 4: "n1", 5: "n1", 6: "n2"}
    assert choose([7], living, {}, 0)[7] == [0, 4, 6, 1]


def test_joiners_do_not_get_in_each_other_s_way() -> None:
    """A node of four is lost; twelve ranks on three nodes live."""
    living = {rank: f"n{rank // 4}" for rank in range(12)}
    chosen = choose([12, 13, 14, 15], living, {"n3": math.inf}, 0)
    assert sorted(rank for ranks in chosen.values() for rank in ranks) == list(range(12))


def test_the_next_attempt_begins_with_another() -> None:
    living = {0: "n0", 2: "n2", 3: "n3"}
    assert len({choose([1], living, {}, turn)[1][0] for turn in range(3)}) == 3


def test_nobody_is_left() -> None:
    assert choose([0, 1], {}, {}, 0) == {0: [], 1: []}


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.integers(0, 40), st.sampled_from("abcdef"), min_size=1),
    st.sets(st.integers(50, 60), min_size=1),
    st.sets(st.sampled_from("abcdef")),
    st.integers(0, 5),
)
def test_load_is_even(living: dict[int, str], joiners: set[int], failed: set[str], turn: int) -> None:
    chosen = choose(joiners, living, dict.fromkeys(failed, math.inf), turn)
    assert chosen.keys() == joiners
    usable = [rank for rank, node in living.items() if node not in failed] or list(living)
    loads = collections.Counter(rank for ranks in chosen.values() for rank in ranks)
    assert loads.keys() <= set(usable)
    for ranks in chosen.values():
        assert len(set(ranks)) == len(ranks)
        assert min(LEAST, len(usable)) <= len(ranks) <= MOST
    assert max(loads.values()) - min(loads[rank] for rank in usable) <= 1
