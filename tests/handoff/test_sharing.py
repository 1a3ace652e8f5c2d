"""Sources of the same bytes share the chunks out: none is forgotten or moved twice, and nobody waits for a dead one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tmd_worker.handoff.sharing import Sharing

PATIENCE_S = 2.0


def dealt(sharing: Sharing, reader: int, count: int, now_s: float = 0.0) -> list[int]:
    chunks = [sharing.take(reader, now_s) for _ in range(count)]
    assert None not in chunks
    return [chunk for chunk in chunks if chunk is not None]


def test_a_source_that_is_faster_serves_more() -> None:
    """One lands a chunk every second, the other every fourth."""
    sharing = Sharing(range(10), PATIENCE_S)
    fast, slow = sharing.join(), sharing.join()
    served = {fast: 0, slow: 0}
    under_way = {fast: sharing.take(fast, 0.0), slow: sharing.take(slow, 0.0)}
    for now_s in range(1, 9):
        for reader in (fast, slow) if now_s % 4 == 0 else (fast,):
            chunk = under_way[reader]
            if chunk is not None:
                sharing.landed(reader, chunk)
                served[reader] += 1
                under_way[reader] = sharing.take(reader, float(now_s))
    assert served == {fast: 8, slow: 2}
    assert sharing.missing == 0


def test_what_a_source_leaves_goes_to_the_one_that_waits() -> None:
    sharing = Sharing(range(3), PATIENCE_S)
    first, second = sharing.join(), sharing.join()
    held = dealt(sharing, first, 2)
    sharing.landed(second, *dealt(sharing, second, 1))
    assert sharing.take(second, 1.0) is None
    assert not sharing.over(second)
    for chunk in reversed(held):
        sharing.give_back(first, chunk)
    assert dealt(sharing, second, 2) == held
    for chunk in held:
        sharing.landed(second, chunk)
    assert sharing.over(second)
    assert sharing.over(first)


def test_who_stalls_is_given_up_once_another_has_waited_long_enough() -> None:
    sharing = Sharing(range(2), PATIENCE_S)
    stalls, works = sharing.join(), sharing.join()
    (held,) = dealt(sharing, stalls, 1)
    sharing.landed(works, *dealt(sharing, works, 1, now_s=10.0))
    assert sharing.next_due_s(works) is None
    assert sharing.take(works, 11.0) is None
    assert sharing.next_due_s(works) == 13.0
    assert sharing.overdue(works, 12.9) == []
    assert sharing.overdue(works, 13.0) == [stalls]
    assert sharing.overdue(works, 14.0) == []
    assert sharing.over(stalls)
    assert not sharing.over(works)
    sharing.give_back(stalls, held)
    assert sharing.take(stalls, 14.0) is None
    assert sharing.take(works, 14.0) == held


def test_who_took_over_gets_the_same_patience() -> None:
    """1. A waits for B; 2. B gives back; 3. C takes what B had; 4. A waits for C, from then on."""
    sharing = Sharing([0], PATIENCE_S)
    a, b, c = sharing.join(), sharing.join(), sharing.join()
    (held,) = dealt(sharing, b, 1)
    assert sharing.take(a, 0.0) is None
    sharing.give_back(b, held)
    assert sharing.take(c, 1.9) == held
    assert sharing.overdue(a, 2.0) == []
    assert sharing.overdue(a, 3.9) == [c]


def test_one_source_alone_is_never_given_up() -> None:
    """Nor is one that waits for chunks which another connection of its own holds."""
    sharing = Sharing([0], PATIENCE_S)
    alone = sharing.join()
    assert sharing.take(alone, 0.0) == 0
    assert sharing.take(alone, 0.0) is None
    assert sharing.next_due_s(alone) is None
    assert sharing.overdue(alone, 1e9) == []


class Sources(RuleBasedStateMachine):
    """Any number of sources take, land, fail and stall in any order."""

    chunks: Bundle[tuple[int, int]] = Bundle("chunks")
    COUNT = 12

    def __init__(self) -> None:
        super().__init__()
        self.sharing = Sharing(range(self.COUNT), PATIENCE_S)
        self.readers = [self.sharing.join()]
        self.held: dict[int, int] = {}
        self.landed: list[int] = []
        self.given_up: set[int] = set()
        self.now_s = 0.0

    @rule()
    def one_more_comes(self) -> None:
        self.readers.append(self.sharing.join())

    @rule(target=chunks, number=st.integers(0, 5), waits_s=st.floats(0, 3))
    def takes(self, number: int, waits_s: float) -> object:
        self.now_s += waits_s
        reader = self.readers[number % len(self.readers)]
        chunk = self.sharing.take(reader, self.now_s)
        if chunk is None:
            free = self.COUNT - len(self.held) - len(self.landed)
            assert reader in self.given_up or not free
            late = self.sharing.overdue(reader, self.now_s)
            assert not (set(late) & self.given_up)
            assert set(late) <= set(self.held.values()) - {reader}
            assert not late or reader not in self.given_up | set(self.held.values())
            self.given_up.update(late)
            return multiple()
        assert chunk not in self.held
        assert chunk not in self.landed
        assert reader not in self.given_up
        self.held[chunk] = reader
        return reader, chunk

    @rule(taken=consumes(chunks))
    def lands(self, taken: tuple[int, int]) -> None:
        self.sharing.landed(*taken)
        self.landed.append(taken[1])
        del self.held[taken[1]]

    @rule(taken=consumes(chunks))
    def is_given_back(self, taken: tuple[int, int]) -> None:
        self.sharing.give_back(*taken)
        del self.held[taken[1]]

    @invariant()
    def nothing_is_lost_or_moved_twice(self) -> None:
        assert self.sharing.missing == self.COUNT - len(self.landed)
        assert len(set(self.landed)) == len(self.landed)
        left = [reader for reader in self.readers if not self.sharing.over(reader)]
        assert bool(left) == (self.sharing.missing > 0)


TestSources = Sources.TestCase
TestSources.settings = settings(max_examples=60, deadline=None)
