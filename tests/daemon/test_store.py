"""The rendezvous store: TCPStore's meaning, each request once, bounds on everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.daemon import records
from tmd.core.instructions import Persist
from tmd.daemon import store as store_module
from tmd.daemon.store import KEYS_LIMIT, REPLIES_KEPT, VALUE_LIMIT_BYTES, JobStore, RendezvousStores
from tmd.ledger.ledger import Ledger
from tmd.protocol.agent import StoreReply, StoreRequest


class Asker:
    """Numbers the requests of one incarnation."""

    def __init__(self, store: JobStore, incarnation: str = "i0") -> None:
        self.store = store
        self.incarnation = incarnation
        self.last = 0

    def __call__(self, operation: str, key: str = "", **fields: object) -> StoreReply:
        self.last += 1
        return self.repeat(operation, key, **fields)

    def repeat(self, operation: str, key: str = "", **fields: object) -> StoreReply:
        request = StoreRequest(request_id=self.last, incarnation=self.incarnation, operation=operation, key=key, **fields)  # type: ignore[arg-type]
        return self.store.apply(request)


@pytest.fixture
def ask() -> Asker:
    return Asker(JobStore({}, {}))


def test_values_come_back_and_go_away(ask: Asker) -> None:
    assert not ask("get", "k").found
    ask("set", "k", value=b"\0v")
    assert ask("get", "k").value == b"\0v"
    assert ask("num_keys").number == 1
    assert ask("delete", "k").number == 1
    assert ask("delete", "k").number == 0
    assert not ask("get", "k").found


def test_check_wants_all_keys(ask: Asker) -> None:
    ask("set", "a", value=b"1")
    assert ask("check", keys=("a",)).found
    assert not ask("check", keys=("a", "b")).found


def test_add_counts_and_reads_as_decimal_text(ask: Asker) -> None:
    assert ask("add", "n", amount=5).number == 5
    assert ask("add", "n", amount=-7).number == -2
    assert ask("get", "n").value == b"-2"
    ask("set", "word", value=b"x")
    assert "no number" in ask("add", "word", amount=1).error
    assert ask("get", "word").value == b"x"


@pytest.mark.parametrize(
    ("before", "expected", "after", "replied"),
    [
        (None, b"", b"new", b"new"),
        (None, b"old", None, b"old"),
        (b"old", b"old", b"new", b"new"),
        (b"other", b"old", b"other", b"other"),
    ],
)
def test_compare_set_is_that_of_tcpstore(
    ask: Asker, before: bytes | None, expected: bytes, after: bytes | None, replied: bytes
) -> None:
    if before is not None:
        ask("set", "k", value=before)
    assert ask("compare_set", "k", expected=expected, value=b"new").value == replied
    now = ask("get", "k")
    assert (now.value if now.found else None) == after


def test_a_repeated_request_is_answered_again_and_done_once(ask: Asker) -> None:
    first = ask("add", "n", amount=1)
    assert ask.repeat("add", "n", amount=1) == first
    assert ask("get", "n").value == b"1"
    other = Asker(ask.store, "i1")
    assert other("add", "n", amount=1).number == 2, "another incarnation's request 1 is another request"


def test_remembered_replies_are_bounded(ask: Asker) -> None:
    for _ in range(REPLIES_KEPT + 3):
        ask("add", "n", amount=1)
    assert ask.store.forgotten == [("i0", 1), ("i0", 2), ("i0", 3)]
    assert len(ask.store.answered) == REPLIES_KEPT


def test_too_much_is_refused_by_name_and_changes_nothing(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(VALUE_LIMIT_BYTES) in ask("set", "k", value=b"x" * (VALUE_LIMIT_BYTES + 1)).error
    assert "1024 bytes" in ask("set", "k" * 1025, value=b"").error
    for number in range(KEYS_LIMIT):
        ask("set", f"k{number}", value=b"")
    assert "4096 keys" in ask("set", "one more", value=b"").error
    assert ask("set", "k0", value=b"a key that is there may change").error == ""
    monkeypatch.setattr(store_module, "TOTAL_LIMIT_BYTES", 100)
    assert "100 bytes" in ask("set", "k0", value=b"x" * 101).error
    assert ask("num_keys").number == KEYS_LIMIT


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(database_url)
    await opened.write(Persist(jobs=(records.job("j1"), records.job("j2"))))
    yield opened
    await opened.close()


class Served:
    """RendezvousStores with its task."""

    def __init__(self, ledger: Ledger) -> None:
        self.stores = RendezvousStores(ledger)
        self.task = asyncio.create_task(self.stores.run())

    async def ask(self, number: int, operation: str, job_id: str = "j1", **fields: object) -> StoreReply:
        answer: asyncio.Future[StoreReply] = asyncio.get_running_loop().create_future()
        request = StoreRequest(request_id=number, incarnation="i0", operation=operation, **fields)  # type: ignore[arg-type]
        self.stores.request(job_id, request, answer.set_result)
        return await asyncio.wait_for(answer, 5)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_a_daemon_that_starts_again_goes_on_where_the_last_one_was(ledger: Ledger) -> None:
    """
    1. A rank adds 1; the daemon does so, and dies before the reply is out.
    2. The rank repeats the request to the next daemon.
    3. It is answered as the first time, and the counter is 1.
    """
    first = Served(ledger)
    await asyncio.gather(first.ask(1, "add", key="n", amount=1), first.ask(2, "set", key="k", value=b"v"))
    await first.stop()
    second = Served(ledger)
    assert (await second.ask(1, "add", key="n", amount=1)).number == 1
    assert (await second.ask(3, "get", key="n")).value == b"1"
    assert (await second.ask(4, "get", key="k")).value == b"v"
    assert not (await second.ask(5, "get", job_id="j2", key="k")).found, "jobs have stores of their own"
    await second.stop()


async def test_many_requests_that_wait_are_one_transaction(ledger: Ledger) -> None:
    served = Served(ledger)
    await served.ask(1, "set", key="warm", value=b"")
    before = ledger.writes
    await asyncio.gather(*(served.ask(number, "set", key=f"k{number}", value=b"v") for number in range(2, 40)))
    assert ledger.writes - before <= 2
    await served.stop()


async def test_a_job_that_ended_leaves_nothing(ledger: Ledger) -> None:
    served = Served(ledger)
    await served.ask(1, "set", key="k", value=b"v")
    await ledger.write(Persist(jobs=(records.job("j1", state="done"),)))
    served.stores.job_ended("j1")
    async with asyncio.timeout(5):
        while await ledger.store_contents("j1") != ({}, {}):
            await asyncio.sleep(0.01)
    await served.stop()
