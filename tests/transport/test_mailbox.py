"""Which message goes to which receive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tmd_worker.transport.mailbox import Mailbox, MailboxClosed, MailboxFull, Message, Receive, deadline_after
from tmd_worker.transport.work import Operation, TmdWork


def receive(tag: int, source: int | None, timeout_s: float = 60.0) -> Receive:
    work = TmdWork(None, lambda: None)
    return Receive(Operation("recv", [], lambda: None, work), torch.zeros(1), tag, source, deadline_after(timeout_s))


def message(source: int, tag: int, text: bytes = b"") -> Message:
    return Message(source, tag, bytearray(text))


def test_messages_that_were_kept_are_received_in_the_order_in_which_they_came() -> None:
    box = Mailbox(frozenset({1, 2}))
    for source, tag, text in ((1, 5, b"a"), (2, 5, b"b"), (1, 5, b"c"), (1, 6, b"d")):
        assert box.keep(message(source, tag, text)) is None
    got = [box.post(receive(tag, source)) for tag, source in ((6, None), (5, 1), (5, None), (5, None))]
    assert [bytes(kept.data) for kept in got if kept] == [b"d", b"a", b"b", b"c"]
    assert box.post(receive(5, 1)) is None


def test_of_the_receives_that_fit_the_first_one_takes_the_message() -> None:
    box = Mailbox(frozenset({1, 2}))
    any_five, from_two, any_later = receive(5, None), receive(5, 2), receive(5, None)
    for waiting in (any_five, from_two, any_later):
        assert box.post(waiting) is None
    assert box.claim(2, 6) is None
    assert box.claim(2, 5) is any_five
    assert box.claim(1, 5) is any_later
    assert box.claim(1, 5) is None
    assert box.keep(message(2, 5)) is from_two
    assert box.deadline(2) is None


def test_readers_are_told_when_their_sender_is_wanted() -> None:
    box = Mailbox(frozenset({1, 2}))
    wanted: dict[int, bool] = {}
    readers = [
        threading.Thread(target=lambda source=source: wanted.update({source: box.wait_wanted(source)})) for source in (1, 2)
    ]
    for reader in readers:
        reader.start()
    box.post(receive(0, 1))
    readers[0].join(10)
    assert wanted == {1: True}
    box.close()
    readers[1].join(10)
    assert wanted == {1: True, 2: False}
    with pytest.raises(MailboxClosed):
        box.post(receive(0, 1))


def test_a_lost_sender_ends_what_waits_for_it_and_for_anybody_once_all_are_lost() -> None:
    box = Mailbox(frozenset({1, 2}))
    from_one, from_any = receive(0, 1), receive(0, None)
    box.post(from_one)
    box.post(from_any)
    assert box.lose(1) == [from_one]
    assert box.deadline(1) is None
    assert box.deadline(2) == from_any.deadline_s
    assert box.lose(2) == [from_any]
    box.post(receive(0, None))
    assert box.deadline(1) is not None


def test_only_what_is_overdue_expires() -> None:
    box = Mailbox(frozenset({1}))
    due, later, any_due = receive(0, 1, 1e-9), receive(0, 1), receive(0, None, 1e-9)
    for waiting in (due, later, any_due):
        box.post(waiting)
    assert box.expire(1) == [due]
    assert box.expire(None) == [any_due]
    assert box.expire(1) == []
    assert box.withdraw(later.operation.work) == [later]
    assert box.withdraw(later.operation.work) == []


def test_who_is_replaced_is_forgotten_with_what_was_sent() -> None:
    box = Mailbox(frozenset({1, 2}))
    box.keep(message(1, 3, b"old"))
    from_two, from_any = receive(0, 2), receive(9, None)
    box.post(from_two)
    box.post(from_any)
    assert box.leave_out(frozenset({1})) == [from_any]
    assert box.post(receive(3, 1)) is None
    assert box.close() != []


def test_what_is_kept_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr("tmd_worker.transport.mailbox.MAX_KEPT_BYTES", 10)
    box = Mailbox(frozenset({1}))
    box.reserve(10)
    box.keep(message(1, 0, b"12345678"))
    with pytest.raises(MailboxFull, match="more than 10 bytes"):
        box.reserve(3)
    box.post(receive(0, 1))
    box.reserve(10)
