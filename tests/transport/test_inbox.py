"""Connections that nobody has taken yet, over a flip."""

from __future__ import annotations

import socket

import pytest

from tmd_worker.transport.connection import Connection
from tmd_worker.transport.handshake import LINK, Hello
from tmd_worker.transport.opening import Inbox


def hello(epoch: int) -> Hello:
    return Hello(
        kind=LINK, incarnation="i1", peer_incarnation="i0", nonce=bytes(16), group="1#pair", epoch=epoch, rank=1, peer_rank=0
    )


@pytest.mark.parametrize("early", [True, False])
def test_what_was_dialed_under_the_old_number_counts_under_the_new_one_whoever_takes_it(early: bool) -> None:
    """Come before the flip or after it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox()
        if not early:
            inbox.flip(3, 4)
        inbox.put(Connection(ours), hello(3))
        if early:
            inbox.flip(3, 4)
        ((claimed, connection),) = inbox.claim("1")
        assert claimed.epoch == 4
        assert connection.sock is ours
