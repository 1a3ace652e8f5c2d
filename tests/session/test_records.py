"""The shelf of records: two generations, and an attempt that was discarded never passes for its successor."""

from __future__ import annotations

from tmd_worker.records import RecordShelf


def test_two_generations_are_kept() -> None:
    shelf = RecordShelf()
    for step in range(-1, 5):
        shelf.put(step, b"%d" % step)
    assert [step for step in range(-1, 6) if shelf.has(step)] == [3, 4]


def test_a_new_attempt_replaces_the_record_and_forgets_its_tail() -> None:
    shelf = RecordShelf()
    shelf.put(3, b"first")
    shelf.put_tail(3, b"t")
    shelf.put(3, b"second")
    reply = shelf.reply(3)
    assert reply is not None
    assert (reply.record, reply.tail) == (b"second", None)
    shelf.put_tail(3, b"")
    assert shelf.tail(3) == b""


def test_a_tail_without_its_record_is_not_kept() -> None:
    shelf = RecordShelf()
    shelf.put_tail(3, b"t")
    assert shelf.reply(3) is None
    assert shelf.tail(3) is None
