"""A state that has come is not kept waiting by a source that does not answer; if none can give it, each says why."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tmd_worker.drawing import Drawing
from tmd_worker.fetching import Fetch
from tmd_worker.state.errors import TransferBroken
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.receiving import Origin, Received

DEADLINE_S = 30.0
HERE, THERE = Origin(1, "n1"), Origin(2, "n2")
STATE = Received(Manifest(step=1, epoch=0, entries=(), structure=b"", record=b""), "tcp", "", (), {})


def test_the_first_that_has_it_is_enough_and_the_others_are_stopped() -> None:
    dialing, hung_up, ended = threading.Event(), threading.Event(), threading.Event()

    def silent(fetch: Fetch) -> Received:
        with fetch.using(hung_up.set):
            dialing.set()
            assert hung_up.wait(DEADLINE_S)
        ended.set()
        raise ConnectionError("hung up")

    with contextlib.closing(Drawing(DEADLINE_S)) as drawing:
        drawing.start(HERE, silent)
        assert dialing.wait(DEADLINE_S)
        drawing.start(THERE, lambda _: STATE)
        assert drawing.result() is STATE
        assert not hung_up.is_set()
    assert ended.is_set()


def test_nothing_is_opened_any_more_once_it_is_closed() -> None:
    may_go_on, refused = threading.Event(), []

    def late(fetch: Fetch) -> Received:
        assert may_go_on.wait(DEADLINE_S)
        try:
            with fetch.using(lambda: None):
                return STATE
        except TransferBroken as error:
            refused.append(str(error))
            raise

    with contextlib.closing(Drawing(DEADLINE_S)) as drawing:
        drawing.start(HERE, late)
        drawing.stop()
        may_go_on.set()
        with pytest.raises(TransferBroken):
            drawing.result()
    assert len(refused) == 1


def test_every_source_that_failed_is_named_and_a_single_one_speaks_for_itself() -> None:
    def refuse(_: Fetch) -> Received:
        raise ConnectionRefusedError("nobody listens")

    def break_off(_: Fetch) -> Received:
        raise TransferBroken("the link closed")

    with contextlib.closing(Drawing(DEADLINE_S)) as drawing:
        drawing.start(HERE, refuse)
        with pytest.raises(ConnectionRefusedError):
            drawing.result()
    with contextlib.closing(Drawing(DEADLINE_S)) as drawing:
        drawing.start(HERE, refuse)
        drawing.start(THERE, break_off)
        with pytest.raises(TransferBroken) as both:
            drawing.result()
    assert "rank 1 on n1: nobody listens" in str(both.value)
    assert "rank 2 on n2: the link closed" in str(both.value)
