"""The rendezvous store of a rank against the daemon's own store, also while the daemon is away."""

from __future__ import annotations

import datetime
import gc
import logging
import threading
import time

import pytest
import torch.distributed as dist

from tmd.daemon.store import JobStore
from tmd.protocol.agent import StoreReply, StoreRequest
from tmd_worker import store as store_module
from tmd_worker.store import AgentStore

SHORT = datetime.timedelta(seconds=0.2)


class Daemon:
    """Answers from a JobStore; can be away, and can lose answers after having acted."""

    def __init__(self) -> None:
        self.keys = JobStore({}, {})
        self.lock = threading.Lock()
        self.away = threading.Event()
        self.lose_answers = 0
        self.asked = 0

    def request(self, request: StoreRequest) -> StoreReply:
        with self.lock:
            self.asked += 1
            if self.away.is_set():
                raise ConnectionError("the agent has no connection")
            reply = self.keys.apply(request)
            if self.lose_answers:
                self.lose_answers -= 1
                raise TimeoutError("no answer")
            return reply


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def store_of(
    daemon: Daemon, timeout: datetime.timedelta = datetime.timedelta(seconds=10), away_limit_s: float = 10.0
) -> AgentStore:
    return AgentStore(daemon.request, "r0.1", timeout=timeout, away_limit_s=away_limit_s)


def exercise(store: dist.Store) -> list[object]:
    """Everything that torch's own stores can do here; the answers."""
    store.set("a", "text")
    store.set("b", b"\xff\x00")
    answers: list[object] = [store.get("a"), store.get("b"), store.add("n", 3), store.add("n", -1), store.get("n")]
    answers += [store.check(["a", "b"]), store.check(["a", "z"])]
    answers += [store.compare_set("c", "", "first"), store.compare_set("c", "first", "second")]
    answers += [store.compare_set("c", "no", "third"), store.compare_set("absent", "old", "new"), store.check(["absent"])]
    store.wait(["a", "c"], datetime.timedelta(seconds=5))
    answers += [store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    return answers


def test_it_answers_as_torchs_own_stores_do(daemon: Daemon) -> None:
    assert exercise(store_of(daemon)) == exercise(dist.HashStore())
    assert exercise(dist.PrefixStore("group", store_of(Daemon()))) == exercise(dist.PrefixStore("group", dist.HashStore()))


def test_prefixes_keep_groups_apart(daemon: Daemon) -> None:
    store = store_of(daemon)
    one, two = dist.PrefixStore("one", store), dist.PrefixStore("two", store)
    one.set("k", "1")
    assert not two.check(["k"])
    assert store.num_keys() == one.num_keys() == 1
    assert store.get("one/k") == b"1"


def test_a_wrapped_store_outlives_its_last_reference(daemon: Daemon) -> None:
    wrapped = dist.PrefixStore("group", store_of(daemon))
    gc.collect()
    wrapped.set("k", "v")
    assert wrapped.get("k") == b"v"


def test_get_waits_for_another_rank(daemon: Daemon) -> None:
    late = threading.Timer(0.1, lambda: store_of(daemon).set("k", "v"))
    late.start()
    assert store_of(daemon).get("k") == b"v"
    late.join()


def test_a_key_that_never_comes_is_named(daemon: Daemon) -> None:
    store = store_of(daemon, SHORT)
    with pytest.raises(dist.DistStoreError, match=r"waited 0.2 s for the key missing, which no rank has set"):
        store.get("missing")
    with pytest.raises(dist.DistStoreError, match=r"key x, y"):
        store.wait(["x", "y"], SHORT)
    store.set_timeout(datetime.timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"waited 0.1 s"):
        store.get("missing")


def test_a_refusal_of_the_daemon_is_passed_on(daemon: Daemon) -> None:
    store = store_of(daemon)
    store.set("k", "no number")
    with pytest.raises(dist.DistStoreError, match="no number"):
        store.add("k", 1)


def test_while_the_daemon_is_away_it_waits_and_says_so(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """Longer than the user's timeout: that counts only while there is a daemon."""
    store = store_of(daemon, SHORT)
    daemon.away.set()
    back = threading.Timer(0.6, daemon.away.clear)
    back.start()
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        store.set("k", "v")
    assert time.monotonic() - began_s >= 0.5
    assert store.get("k") == b"v"
    back.join()
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the daemon: store set k (the agent has no connection)"
    ]


def test_it_gives_up_when_the_daemon_stays_away(daemon: Daemon) -> None:
    daemon.away.set()
    with pytest.raises(dist.DistStoreError, match=r"waited 0.2 s for the daemon, which did not come back.*tmd"):
        store_of(daemon, away_limit_s=0.2).add("n", 1)


def test_a_lost_answer_is_asked_for_again_and_counts_once(daemon: Daemon) -> None:
    store = store_of(daemon)
    daemon.lose_answers = 3
    assert store.add("n", 1) == 1
    assert daemon.asked == 4
    assert store.add("n", 1) == 2


def test_two_stores_of_one_process_do_not_share_an_answer(daemon: Daemon) -> None:
    assert [store_of(daemon).add("n", 1) for _ in range(3)] == [1, 2, 3]


def test_a_process_group_meets_over_it(daemon: Daemon) -> None:
    store = store_of(daemon)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0], backend="gloo")
        dist.barrier(group)
    finally:
        dist.destroy_process_group()


def test_a_poll_is_never_slower_than_it_says() -> None:
    assert store_module.POLL_MAX_S <= 0.1
