"""The rank's socket to its agent: newest status wins, nothing blocks, a silent agent is named."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from tests.session.frames import receive, send
from tmd.protocol.agent import StoreReply, StoreRequest
from tmd.protocol.control import PeerExiting, RankUpdate, RankWelcome
from tmd.protocol.rank import RankStatus
from tmd_worker.control import Control

WELCOME = RankWelcome(
    job_id="j",
    incarnation="i1",
    node="n0",
    host="127.0.0.1",
    rank=0,
    local_rank=0,
    world_size=1,
    nproc_per_node=1,
    job_key=b"k" * 32,
    hold_limit_s=5.0,
    heartbeat_s=0.5,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    agent, rank = socket.socketpair()
    agent.settimeout(10)
    yield agent, rank
    agent.close()
    rank.close()


def status(version: int) -> RankStatus:
    return RankStatus(job_id="j", incarnation="i1", version=version, rank=0)


def test_welcome_is_the_first_message_and_orders_behind_it_are_kept(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    seen: queue.Queue[object] = queue.Queue()
    send(agent, WELCOME, PeerExiting(incarnation="i2"))
    control = Control(rank)
    assert control.welcome() == WELCOME
    control.start(seen.put)
    assert seen.get(timeout=10) == PeerExiting(incarnation="i2")


def test_an_agent_that_speaks_out_of_turn_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    send(agent, PeerExiting(incarnation="i2"))
    with pytest.raises(ConnectionError, match="expected RankWelcome"):
        Control(rank).welcome()


def test_an_agent_that_hangs_up_before_its_welcome_is_named(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    agent.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match="before it said welcome"):
        Control(rank).welcome()


def test_statuses_that_an_agent_does_not_read_never_block_and_only_the_newest_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    agent, rank = pair
    control = Control(rank)
    control.start(lambda _: None)
    big = "x" * 100_000
    for version in range(1, 201):
        control.send_status(RankStatus(job_id="j", incarnation="i1", version=version, rank=0, reason=big))
    control.send_status(status(7))  # overtaken long ago
    versions = [received.status.version for received in receive(agent, RankUpdate, until=lambda u: u.status.version == 200)]
    assert versions == sorted(versions)
    assert len(versions) < 200
    assert control.flush(10)


def test_store_replies_find_their_request(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    control = Control(rank)
    control.start(lambda _: None)
    send(agent, StoreReply(request_id=4, incarnation="i1", value=b"late"))
    send(agent, StoreReply(request_id=5, incarnation="i1", value=b"v"))
    reply = None
    while reply is None:  # the answers above may have come before the question
        try:
            reply = control.request(StoreRequest(request_id=5, incarnation="i1", operation="get", key="k"), 0.05)
        except TimeoutError:
            send(agent, StoreReply(request_id=4, incarnation="i1", value=b"late"))
            send(agent, StoreReply(request_id=5, incarnation="i1", value=b"v"))
    assert reply.value == b"v"


def test_an_agent_that_goes_away_ends_a_store_request_but_not_the_rank(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    control = Control(rank)
    control.start(lambda _: None)
    agent.close()
    with pytest.raises(ConnectionError, match="closed the control socket"):
        control.request(StoreRequest(request_id=1, incarnation="i1", operation="get", key="k"), 10)
    control.send_status(status(1))
    assert not control.flush(10)
