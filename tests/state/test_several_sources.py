"""A state drawn from two replicas is the one that the leader holds, whatever becomes of either."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.state.handoff_rig import DEADLINE_S, Closed, Cut, Damage, Lines, OneSource
from tmd_worker.handoff.transfer import CHUNK_BYTES
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.receiving import Origin, Received, Receiving
from tmd_worker.state.tracked import Tracked

#: Of one chunk each: so many that neither source has asked for all of them before the other begins.
PARAMETERS = 14
WIDTH = CHUNK_BYTES // 4
#: More than a manifest has, less than a chunk.
FEW_BYTES = 64 << 10
LEADER, OTHER = Origin(0, "n0"), Origin(1, "n1")

End = Received | BaseException


def made(value: float, parameters: int = PARAMETERS, width: int = WIDTH) -> Tracked:
    model = nn.Module()
    for number in range(parameters):
        setattr(model, f"weight{number}", nn.Parameter(torch.full((width,), value + number)))
    tracked = Tracked()
    tracked.add("model", model)
    return tracked


class After:
    """Lets the leader's first bytes through; the others wait for the other source, which has come by then, and for what a test
    does with them."""

    def __init__(self, then: Damage = lambda data: data) -> None:
        self.may_go_on = threading.Event()
        self._then = then
        self._passed_bytes = 0

    def __call__(self, data: bytes) -> bytes:
        self._passed_bytes += len(data)
        if self._passed_bytes > FEW_BYTES:
            assert self.may_go_on.wait(DEADLINE_S)
        return self._then(data)


def drawn(
    target: Tracked,
    replicas: Sequence[Tracked],
    *,
    leader: Damage = lambda data: data,
    other: Damage = lambda data: data,
    patience_s: float = DEADLINE_S,
    deadline_s: float = DEADLINE_S,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[End], list[BaseException | None]]:
    """How it ended with each replica, at the joiner and there. The first one leads; `after`: once the joiner
    has ended with both."""
    receiving = Receiving(target, per_rank=False, patience_s=patience_s)
    ends: dict[Origin, End] = {}
    gate = After(leader)

    def draw(source: OneSource, origin: Origin) -> None:
        try:
            ends[origin] = source.draw(receiving, target, origin)
        except StateError as error:
            ends[origin] = error

    with contextlib.ExitStack() as stack:
        sources, threads = [], []
        for number, (replica, origin, damage) in enumerate(zip(replicas, (LEADER, OTHER), (gate, other), strict=True)):
            source = OneSource(stack.enter_context(Lines(damage)), *replica.full_state(step=4, epoch=3), deadline_s)
            sources.append(source)
            threads.append(threading.Thread(target=draw, args=(source, origin)))
            threads[-1].start()
            until(lambda number=number, origin=origin: len(receiving._parts) > number or origin in ends)
        gate.may_go_on.set()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        after()
    return [ends[LEADER], ends[OTHER]], [source.heard for source in sources]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def assert_holds(target: Tracked, replica: Tracked) -> None:
    assert target.intact
    assert target.digest() == replica.digest()


def test_each_brings_a_part_and_one_says_what_is_right() -> None:
    replicas, target = [made(1.5), made(1.5)], made(0.0)
    ends, heard = drawn(target, replicas)
    assert heard == [None, None]
    assert isinstance(ends[0], Received)
    assert ends[1] is ends[0]
    assert_holds(target, replicas[0])
    assert [(source.rank, source.node, source.transport) for source in ends[0].sources] == [(0, "n0", "tcp"), (1, "n1", "tcp")]
    assert all(source.size_bytes > 0 for source in ends[0].sources)
    assert ends[0].bytes_by_transport == {"tcp": PARAMETERS * CHUNK_BYTES}
    assert list(ends[0].parts_s) == ["manifest", "bytes", "digests", "place"]


@pytest.mark.parametrize("broken", [0, 1])
def test_who_breaks_off_leaves_its_share_to_the_other_which_leads_then(broken: int) -> None:
    replicas, target = [made(1.5), made(1.5)], made(0.0)
    cut = Cut(FEW_BYTES + 2 * CHUNK_BYTES)
    ends, heard = drawn(target, replicas, **{("leader", "other")[broken]: cut})
    assert isinstance(ends[broken], TransferBroken)
    assert isinstance(heard[broken], TransferBroken)
    whole = ends[1 - broken]
    assert isinstance(whole, Received)
    assert heard[1 - broken] is None
    assert_holds(target, replicas[0])
    assert f"rank {broken} on n{broken}: the best of tcp; it was left: tcp: " in whole.why


def test_who_stalls_is_not_waited_for_when_the_other_is_done() -> None:
    replicas, target = [made(1.5), made(1.5)], made(0.0)
    stalled = After()
    ends, _ = drawn(target, replicas, other=stalled, patience_s=0.3, after=stalled.may_go_on.set)
    assert isinstance(ends[0], Received)
    assert str(ends[1]).endswith("and took them over")
    assert_holds(target, replicas[0])


def test_a_leader_that_stalls_before_its_digests_loses_the_lead() -> None:
    """The bytes have come by then, and both sources have heard of it."""
    replicas, target = [made(1.5, 3, 100), made(1.5, 3, 100)], made(0.0, 3, 100)
    frames = 0

    def without_digests(data: bytes) -> bytes:
        nonlocal frames
        frames += data.startswith(b"TMDS")
        if frames > 1:
            raise Closed(b"")
        return data

    ends, _ = drawn(target, replicas, leader=without_digests)
    assert isinstance(ends[0], TransferBroken)
    assert isinstance(ends[1], Received)
    assert_holds(target, replicas[0])


def test_what_another_brought_counts_only_if_the_leader_has_it_too() -> None:
    replicas, target = [made(1.5), made(2.5)], made(0.0)
    ends, _ = drawn(target, replicas)
    assert isinstance(ends[0], Received)
    assert ends[1] is ends[0]
    assert_holds(target, replicas[0])
    assert "chunks of other sources differed from what it holds and were read again from it" in ends[0].why
    assert sum(ends[0].bytes_by_transport.values()) > PARAMETERS * CHUNK_BYTES


def test_a_source_with_other_tensors_is_not_used() -> None:
    replicas, target = [made(1.5), made(1.5, PARAMETERS - 1)], made(0.0)
    ends, heard = drawn(target, replicas)
    assert isinstance(ends[0], Received)
    assert [source.rank for source in ends[0].sources] == [0]
    assert isinstance(ends[1], StateMismatch)
    assert isinstance(heard[1], StateMismatch)
    assert "rank 1 on n1 describes other tensors than rank 0 on n0" in str(heard[1])
    assert_holds(target, replicas[0])


def test_a_state_of_another_step_than_is_expected_touches_nothing() -> None:
    source, target = made(1.5, 1, 10), made(0.0, 1, 10)
    with Lines(None) as lines:
        one = OneSource(lines, *source.full_state(step=4, epoch=3), DEADLINE_S)
        with pytest.raises(TransferBroken, match="rank 0 on n0 sent its state before step 4, expected 5"):
            one.draw(Receiving(target, per_rank=False, step=5), target, LEADER)
    assert_holds(target, made(0.0, 1, 10))
