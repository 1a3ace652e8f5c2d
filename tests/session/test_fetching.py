"""Two fetches of a state never run side by side, so none writes into a state that is in use already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.handoff.rig import DEADLINE_S, Pair, connected
from tests.handoff.test_tcp import Trickle
from tmd_worker.fetching import Fetch, Fetches
from tmd_worker.handoff.transfer import CHUNK_BYTES, TransferFailed
from tmd_worker.state.errors import TransferBroken


@contextlib.contextmanager
def in_thread(fetch: Fetch, body: object) -> Iterator[threading.Thread]:
    assert callable(body)
    thread = threading.Thread(target=fetch.run, args=(body,))
    thread.start()
    yield thread
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_the_next_fetch_begins_once_a_stalled_read_of_the_one_before_has_ended_for_good() -> None:
    contents = [b"\7" * (2 * CHUNK_BYTES)]
    trickle = Trickle(10_000, (0,))
    fetches, failures = Fetches(DEADLINE_S), []
    with contextlib.closing(trickle), connected(contents, between=trickle, streams=1) as pair:
        first, reading = fetches.next(), threading.Event()

        def stall() -> None:
            with first.using(pair.joiner.close):
                reading.set()
                try:
                    pair.read()
                except TransferFailed as error:
                    failures.append(error)

        with in_thread(first, stall):
            assert reading.wait(DEADLINE_S)
            second = fetches.next()
            second.run(second.take_over)
            assert first.ended
            assert len(failures) == 1
            with pytest.raises(TransferFailed, match="this end was closed"):
                pair.joiner.connect(pair.source.accept(b"", DEADLINE_S), DEADLINE_S)


def test_a_stopped_fetch_uses_nothing_new() -> None:
    fetches = Fetches(DEADLINE_S)
    first, may_go_on, refused = fetches.next(), threading.Event(), []

    def late() -> None:
        assert may_go_on.wait(DEADLINE_S)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(first.using(lambda: None))
            except TransferBroken as error:
                refused.append(str(error))

    with in_thread(first, late):
        first.stop()
        may_go_on.set()
    assert refused == ["this fetch of the state was stopped: a later one has taken its place"]


def test_while_one_does_not_end_no_later_one_begins() -> None:
    fetches, may_end = Fetches(0.1), threading.Event()
    first = fetches.next()
    with in_thread(first, lambda: may_end.wait(DEADLINE_S)):
        for later in (fetches.next(), fetches.next()):
            with pytest.raises(TransferBroken, match=r"did not end in 0.1 s"):
                later.run(later.take_over)
        may_end.set()
    last = fetches.next()
    last.run(last.take_over)


def test_an_end_that_is_closed_while_it_dials_has_no_connection() -> None:
    pair = Pair([b"bytes"])
    with contextlib.closing(pair):
        dial = pair.joiner._dial

        def dial_and_close(fields: dict[str, object], timeout_s: float) -> object:
            pair.joiner._closed = True  # as `close` does at first; it then waits for this connect
            return dial(fields, timeout_s)

        pair.joiner._dial = dial_and_close  # type: ignore[assignment]
        with pytest.raises(TransferFailed, match="this end was closed"):
            pair.connect()
        assert not pair.joiner._wires
