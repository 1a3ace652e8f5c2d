"""Records of small state reach the buddy, two generations are kept, and what the ward said last is read after poison."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transport.mesh import Node, mesh, together, wait_until
from tests.transport.ranks import Rank, ranks
from tmd_worker.core.ballot import Ballot
from tmd_worker.transport import buddy
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_holds_its_wards_record(size: int) -> None:
    with mesh(size) as made:

        def step(node: Node) -> Any:
            channel = node.fabric.buddy
            for number in range(5):
                channel.send(Kind.RECORD, number, f"record {node.rank}.{number}".encode())
                assert channel.wait_for(number, 5.0)
                assert node.fabric.vote(Ballot.single(epoch=0, step=number), 5.0)[0]
            return channel.ward_records(4), channel.ward_records(3), channel.ward_records(2)

        for node, kept in zip(made.nodes, together(made.nodes, step), strict=True):
            ward = (node.rank - 1) % size
            assert kept == ((f"record {ward}.4".encode(), None, False), (f"record {ward}.3".encode(), None, False), None)


def test_a_tail_belongs_to_its_step() -> None:
    with mesh(2) as made:
        ward, keeper = made.nodes
        ward.fabric.buddy.send(Kind.RECORD, 0, b"zero")
        ward.fabric.buddy.send(Kind.RECORD, 1, b"one")
        ward.fabric.buddy.send(Kind.TAIL, 1, b"")
        wait_until(lambda: keeper.fabric.buddy.ward_records(1) == (b"one", b"", True))
        assert keeper.fabric.buddy.ward_records(0) == (b"zero", None, True)


@pytest.mark.parametrize("size", [0, MAX_PAYLOAD_BYTES - 16, MAX_PAYLOAD_BYTES, 5_000_000])
def test_records_of_any_size(size: int) -> None:
    with mesh(3) as made:
        record = bytes(range(256)) * (size // 256) + bytes(size % 256)
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 0, record)
        assert made.nodes[1].fabric.buddy.wait_for(0, 5.0)
        assert made.nodes[1].fabric.buddy.ward_records(0) == (record, None, False)


def test_a_record_beyond_the_limit_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buddy, "MAX_RECORD_BYTES", 1000)
    with mesh(2) as made, pytest.raises(ValueError, match="has 1001 bytes, the limit is 1000"):
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 0, bytes(1001))


def test_a_record_of_an_earlier_attempt_does_not_count() -> None:
    with mesh(2) as made:
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 5, b"first attempt")
        assert made.nodes[1].fabric.buddy.wait_for(5, 5.0)
        for node in made.nodes:
            node.events.poison(0, "test")
        made.go_live(made.table(1))
        keeper = made.nodes[1].fabric.buddy
        assert keeper.ward_records(5) == (b"first attempt", None, False)
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 5, b"second attempt")
        assert keeper.wait_for(5, 5.0)
        assert keeper.ward_records(5) == (b"second attempt", None, False)


def test_a_record_can_be_sent_before_the_word_to_go_on() -> None:
    with mesh(3) as made:
        for node in made.nodes:
            node.events.poison(0, "test")
        together(made.nodes, lambda node: node.fabric.open(made.table(1), node.rank, 5.0))
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 3, b"ahead", epoch=1)
        wait_until(lambda: made.nodes[1].fabric.buddy.ward_records(3) == (b"ahead", None, False))


def test_a_ward_that_sends_nothing_breaks_its_link_at_the_deadline() -> None:
    with mesh(3) as made:
        assert not made.nodes[1].fabric.buddy.wait_for(0, 0.1)
        assert made.nodes[1].events.broken[0][:3] == (0, 0, False)
        made.nodes[1].fabric.buddy.send(Kind.RECORD, 0, b"nobody hears it")


@pytest.mark.parametrize("one_host", [False, True])
def test_what_the_ward_sent_before_it_died_is_there_after_poison(one_host: bool) -> None:
    """1. The keeper is poisoned by another link first. 2. The ward, still alive, sends its record and dies. 3. It is there."""

    def body(rank: Rank) -> Any:
        if rank.rank == 0:
            rank.events.poison = lambda *_: None  # type: ignore[method-assign]  # it does not notice in time
            rank.tell("ready")
            rank.hear()
            rank.fabric.buddy.send(Kind.RECORD, 0, bytes(3_000_000))
            rank.fabric.buddy.send(Kind.TAIL, 0, b"last words")
            rank.tell("sent")
            rank.hear()
        if rank.rank == 1:
            rank.tell("ready")
            rank.hear()
            rank.events.poison(0, "another link broke")
            rank.tell("poisoned")
            rank.hear()
            kept = rank.fabric.buddy.ward_records(0)
            return kept is not None and (len(kept[0]), *kept[1:])
        rank.hear()
        return None

    with ranks(3, body, one_host=one_host) as processes:
        ward, keeper, _ = processes
        assert (ward.hear(), keeper.hear()) == ("ready", "ready")
        keeper.tell("go")
        assert keeper.hear() == "poisoned"
        ward.tell("go")
        assert ward.hear() == "sent"
        ward.kill()
        keeper.tell("go")
        assert keeper.hear() == (3_000_000, b"last words", True)


def test_taking_another_role_forgets_the_other_wards_records() -> None:
    with mesh(3) as made:
        made.nodes[0].fabric.buddy.send(Kind.RECORD, 0, b"of rank 0")
        assert made.nodes[1].fabric.buddy.wait_for(0, 5.0)
        made.nodes[1].fabric.set_role(2, 3, 1)
        assert made.nodes[1].fabric.buddy.ward_records(0) is None
