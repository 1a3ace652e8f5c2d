"""Whoever waits for a small record reads it itself; all else on the link is its reader's; nothing is lost between the two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.transport.mesh import mesh, wait_until
from tests.transport.ranks import DEADLINE_S
from tmd_worker.transport import native
from tmd_worker.transport.buddy import BuddyChannel
from tmd_worker.transport.link import Link
from tmd_worker.transport.ward import PREFIX, SMALL_BYTES, WardLink
from tmd_worker.transport.wire import HEADER, MAGIC, Kind

WARD, KEEPER = 0, 1


@pytest.fixture(params=["native", "python"], autouse=True)
def hearing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native, "hear_ward", lambda *_: None)


class Pair:
    """A ward and who keeps its records, whose main thread is the test's."""

    def __init__(self, made: Any) -> None:
        self.ward: BuddyChannel = made.nodes[WARD].fabric.buddy
        self.keeper: BuddyChannel = made.nodes[KEEPER].fabric.buddy
        self.events = made.nodes[KEEPER].events
        self.events_of_ward = made.nodes[WARD].events
        self.way: Link = self.ward._links[0][KEEPER]

    @property
    def link(self) -> WardLink:
        (link,) = self.keeper._wards.values()
        return link

    def lend(self) -> None:
        """The first record is the reader's; then it steps aside."""
        self.ward.send(Kind.RECORD, 0, b"zero")
        assert self.keeper.wait_for(0, DEADLINE_S)
        wait_until(lambda: self.link.lent)

    def heard(self, step: int) -> tuple[bytes, bytes | None, bool] | None:
        return self.keeper.ward_records(step)


@contextmanager
def lent() -> Iterator[Pair]:
    with mesh(2) as made:
        pair = Pair(made)
        pair.lend()
        yield pair


def in_background(action: Callable[[], Any]) -> Callable[[], Any]:
    """Starts it; the result waits for its end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE_S)
        assert results, "still waiting"
        return results[0]

    return result


def frame(kind: Kind, sequence: int, step: int, payload: bytes) -> bytes:
    return HEADER.pack(MAGIC, kind, 0, sequence, PREFIX.size + len(payload)) + PREFIX.pack(step, len(payload)) + payload


def test_who_waits_reads_while_records_are_small() -> None:
    with lent() as pair:
        for step in range(1, 50):
            pair.ward.send(Kind.TAIL, step - 1, b"tail")
            pair.ward.send(Kind.RECORD, step, b"record")
            with pair.link._turn:  # nobody else can have read it: the reader would have to come back under this lock
                assert pair.link.lent
            assert pair.keeper.wait_for(step, DEADLINE_S)
        assert pair.heard(49) == (b"record", None, True)
        assert pair.heard(48) == (b"record", b"tail", True)


def test_a_wait_that_begins_before_the_record_comes() -> None:
    with lent() as pair:
        kept = in_background(lambda: pair.keeper.wait_for(1, DEADLINE_S))
        wait_until(lambda: pair.link._borrowed)
        pair.ward.send(Kind.RECORD, 1, b"one")
        assert kept() is True
        assert pair.heard(1) == (b"one", None, False)


def test_what_nobody_waits_for_is_read_all_the_same() -> None:
    """A large tail would else hold up the ward, for which this rank may wait in a collective."""
    with lent() as pair:
        tail = bytes(5_000_000)
        pair.ward.send(Kind.TAIL, 0, tail)
        wait_until(lambda: pair.heard(0) == (b"zero", tail, True))


def test_both_send_more_than_fits_before_either_waits() -> None:
    with mesh(2) as made:
        channels = [node.fabric.buddy for node in made.nodes]
        for step, size in enumerate([4, 4, 5_000_000, 5_000_000, 4, 4]):
            done = [
                in_background(lambda channel=channel, step=step, size=size: _exchange(channel, step, bytes(size)))  # type: ignore[misc]
                for channel in channels
            ]
            assert [result() for result in done] == [True, True]


def _exchange(channel: BuddyChannel, step: int, record: bytes) -> bool:
    channel.send(Kind.RECORD, step, record)
    return channel.wait_for(step, DEADLINE_S)


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1, 3_000_000])
def test_records_grow_and_shrink(size: int) -> None:
    with lent() as pair:
        for step, record in enumerate([b"one", bytes(size), b"three", b"four"], start=1):
            sent = in_background(lambda step=step, record=record: pair.ward.send(Kind.RECORD, step, record))  # type: ignore[misc]
            assert pair.keeper.wait_for(step, DEADLINE_S)
            sent()
            assert pair.heard(step) == (record, None, False)


def test_a_message_in_pieces() -> None:
    with lent() as pair:
        whole = frame(Kind.RECORD, pair.way.state.sent, 1, b"one")
        kept = in_background(lambda: pair.keeper.wait_for(1, DEADLINE_S))
        for piece in (whole[:7], whole[7:41], whole[41:]):
            pair.way.stream.sock.sendall(piece)
            wait_until(lambda: not pair.link.lent)
        assert kept() is True
        assert pair.heard(1) == (b"one", None, False)


def test_the_reader_comes_back_between_the_look_and_the_wait() -> None:
    """1. Who waits sees no record, and a lent link. 2. The reader reads the record and lends again. 3. Nothing more comes."""
    with lent() as pair:
        pair.ward.send(Kind.RECORD, 1, b"one")
        wait_until(lambda: pair.keeper._has(1, 0))
        wait_until(lambda: pair.link.lent)
        asked = []

        def enough() -> bool:
            asked.append(pair.link._borrowed)
            return pair.keeper._decided(1, 0)

        assert pair.link.receive(DEADLINE_S, enough)
        assert asked == [True]


def test_poison_ends_the_wait_and_the_last_words_are_read() -> None:
    with lent() as pair:
        pair.events_of_ward.poison = lambda *_: None  # it does not notice in time
        kept = in_background(lambda: pair.keeper.wait_for(1, DEADLINE_S))
        wait_until(lambda: pair.link._borrowed)
        pair.events.poison(0, "another link broke")
        assert kept() is False
        pair.ward.send(Kind.RECORD, 1, b"last words")
        wait_until(lambda: pair.heard(1) == (b"last words", None, False))


def test_poison_before_the_wait_begins() -> None:
    with lent() as pair:
        pair.events.poison(0, "another link broke")
        assert not pair.keeper.wait_for(1, DEADLINE_S)


def test_a_deadline_that_passes_while_who_waits_reads() -> None:
    with lent() as pair:
        assert not pair.keeper.wait_for(1, 0.05)
        assert pair.events.broken[0][:3] == (0, WARD, False)


@pytest.mark.parametrize("waits", [False, True])
def test_the_end_of_the_link_is_seen(waits: bool) -> None:
    with lent() as pair:
        kept = in_background(lambda: pair.keeper.wait_for(1, DEADLINE_S)) if waits else None
        if waits:
            wait_until(lambda: pair.link._borrowed)
        pair.way.shut()
        wait_until(lambda: bool(pair.events.broken))
        assert pair.events.broken[0][:2] == (0, WARD)
        wait_until(lambda: not pair.keeper._wards)
        if kept is not None:
            assert kept() is False


@pytest.mark.parametrize(
    "sent",
    [
        frame(Kind.BALLOT, 1, 1, b"one"),
        frame(Kind.RECORD, 7, 1, b"one"),
        b"not a frame at all, but more bytes than a header has",
        HEADER.pack(MAGIC, Kind.RECORD, 0, 1, 3) + b"abc",
        HEADER.pack(MAGIC, Kind.RECORD, 0, 1, PREFIX.size) + PREFIX.pack(1, 1 << 60),
    ],
    ids=["kind", "sequence", "garbage", "short", "size"],
)
def test_what_is_no_record_ends_the_link(sent: bytes) -> None:
    with lent() as pair:
        assert pair.way.state.sent == 1
        kept = in_background(lambda: pair.keeper.wait_for(1, DEADLINE_S))
        wait_until(lambda: pair.link._borrowed)
        pair.way.stream.sock.sendall(sent)
        assert kept() is False
        assert pair.events.broken[0][:3] == (0, WARD, False)
