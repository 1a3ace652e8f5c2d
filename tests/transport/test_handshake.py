"""Who may connect: only holders of the job key, only for what both sides expect, and nobody else disturbs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.transport.mesh import Mesh, Node, mesh, together, wait_until
from tmd.protocol.membership import Member
from tmd_worker.transport import handshake
from tmd_worker.transport.dialing import Unreached, dial
from tmd_worker.transport.fabric import Cancelled, LinkError
from tmd_worker.transport.handshake import LINK, Hello, Verdict, new_nonce
from tmd_worker.transport.listener import MAX_HALF_OPEN


@pytest.fixture
def pair() -> Iterator[Mesh]:
    with mesh(2) as made:
        yield made


def ask(to: Node, key: bytes = b"k" * 32, **changed: Any) -> Verdict:
    """Dials as rank 1 of epoch 0 would for group "late", with whatever is changed."""
    wanted: dict[str, Any] = {
        "kind": LINK,
        "incarnation": "inc-1",
        "peer_incarnation": to.incarnation,
        "group": "late",
        "epoch": 0,
        "rank": 1,
        "peer_rank": to.rank,
    }
    hello = Hello(nonce=new_nonce(), **{**wanted, **changed})
    connection, verdict = dial(to.member, key, hello, time.monotonic() + 5, lambda _: None)
    connection.close()
    return verdict


def test_the_expected_member_is_accepted(pair: Mesh) -> None:
    assert ask(pair.nodes[0]).answer == "ok"


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({"epoch": 1}, "retry"),
        ({"epoch": -1}, "refused"),
        ({"incarnation": "a-zombie"}, "refused"),
        ({"rank": 0}, "refused"),
        ({"peer_rank": 1}, "refused"),
        ({"peer_incarnation": "who-was-here-before"}, "refused"),
        ({"kind": "nothing-serves-this"}, "retry"),
    ],
)
def test_anything_else_is_told_whether_to_try_again(pair: Mesh, changed: dict[str, Any], answer: str) -> None:
    assert ask(pair.nodes[0], **changed).answer == answer


def test_an_epoch_that_was_closed_is_refused_for_good(pair: Mesh) -> None:
    pair.nodes[0].events.poison(0, "test")
    verdict = ask(pair.nodes[0])
    assert (verdict.answer, verdict.reason) == ("refused", "epoch 0 is over here (every epoch up to 0 is)")


def test_a_second_plan_for_an_epoch_makes_the_first_ones_joiner_try_again_and_not_give_up(pair: Mesh) -> None:
    joiner = pair.add("inc-j", 1)
    pair.nodes[0].fabric.expect(pair.table(1, r1=joiner))
    assert ask(pair.nodes[0], epoch=1).answer == "retry"
    assert ask(pair.nodes[0], epoch=1, incarnation="inc-j").answer == "ok"


def test_another_key_gets_no_answer_at_all(pair: Mesh) -> None:
    with pytest.raises(LinkError, match="does not hold this job's key"):
        ask(pair.nodes[0], key=b"x" * 32)


def test_a_listener_with_another_key_is_not_believed() -> None:
    nonce, hello = handshake.greeting(), Hello(kind=LINK, incarnation="a", peer_incarnation="b", nonce=new_nonce())
    sealed = handshake.seal_verdict(b"their key", nonce, hello, Verdict(answer="ok"))
    size = handshake.body_bytes(sealed[:4])
    with pytest.raises(handshake.HandshakeRefused):
        handshake.open_verdict(b"our key", nonce, hello, sealed[4 : 4 + size], sealed[4 + size :])


def test_a_recorded_hello_cannot_be_used_again(pair: Mesh) -> None:
    """1. A dialer proves itself. 2. What it said is sent again on a new connection. 3. The nonce there is another: closed."""
    member = pair.nodes[0].member
    with connected(member) as first, connected(member) as second:
        hello = Hello(kind=LINK, incarnation="inc-1", peer_incarnation="inc-0", nonce=new_nonce(), group="g", epoch=0, rank=1)
        sealed = handshake.seal_hello(b"k" * 32, first.recv(handshake.GREETING_BYTES), hello)
        first.sendall(sealed)
        assert first.recv(1)
        second.recv(handshake.GREETING_BYTES)
        second.sendall(sealed)
        assert second.recv(1) == b""


@pytest.mark.parametrize("garbage", [b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0\0\0\1x" + b"y" * 40])
def test_garbage_is_closed_and_disturbs_nobody(pair: Mesh, garbage: bytes) -> None:
    with connected(pair.nodes[0].member) as stranger:
        stranger.sendall(garbage)
        assert read_to_end(stranger)[: len(handshake.GREETING)] == handshake.GREETING
    assert ask(pair.nodes[0]).answer == "ok"
    assert pair.nodes[0].events.broken == []


def test_connections_that_say_nothing_do_not_keep_others_out(pair: Mesh) -> None:
    """More of them than may be half open: the oldest make room."""
    silent = [connected(pair.nodes[0].member) for _ in range(MAX_HALF_OPEN + 20)]
    try:
        assert ask(pair.nodes[0]).answer == "ok"
    finally:
        for sock in silent:
            sock.close()


def test_other_kinds_of_connections_reach_their_handler(pair: Mesh) -> None:
    """Neither end may gather small pieces: an answer of several would wait for the peer's delayed acknowledgements."""
    server, client = pair.nodes
    undelayed = []

    def handler(sock: socket.socket, fields: dict[str, object]) -> None:
        undelayed.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        sock.sendall(repr(sorted(fields.items())).encode())
        sock.close()

    server.fabric.serve("state", handler)
    with client.fabric.connect(server.member, "state", {"step": 7}, 5.0) as sock:
        undelayed.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        assert read_to_end(sock) == b"[('incarnation', 'inc-1'), ('step', 7)]"
    assert all(undelayed)


def test_a_connection_that_nothing_serves_fails_with_the_reason(pair: Mesh) -> None:
    with pytest.raises(LinkError, match="nothing serves rehearsal connections here"):
        pair.nodes[1].fabric.connect(pair.nodes[0].member, "rehearsal", {}, 0.5)


def test_links_of_a_future_epoch_wait_until_both_sides_know_it(pair: Mesh) -> None:
    """1. The dialer (the higher rank) hears of the epoch first and is told to retry. 2. Its peer hears of it: both open."""
    lower, higher = pair.nodes
    table = pair.table(1)

    def open_links(node: Node) -> int:
        if node is lower:
            wait_until(lambda: bool(higher.fabric._attempts))
        return node.fabric.open(table, node.rank, 5.0)

    assert together([higher, lower], open_links) == [3, 3]


def test_a_dead_member_fails_the_opening_at_once() -> None:
    with mesh(2, live=False) as made:
        table = made.table(0)
        made.nodes[0].fabric.close_all()
        began_s = time.monotonic()
        with pytest.raises(Unreached, match=r"no link of group .* to rank 0: inc-0"):
            made.nodes[1].fabric.open(table, 1, 30.0)
        assert time.monotonic() - began_s < 5


def test_a_member_that_does_not_come_fails_the_opening_in_time() -> None:
    with mesh(2, live=False) as made, pytest.raises(LinkError, match="did not open its link of group"):
        made.nodes[0].fabric.open(made.table(0), 0, 0.2)
    with (
        mesh(2, live=False) as made,
        pytest.raises(LinkError, match="rank 0 was not ready in time: epoch 0 is not known here yet"),
    ):
        made.nodes[1].fabric.open(made.table(0), 1, 1.0)


def test_who_is_dialed_in_vain_is_known_while_it_goes_on_and_who_waits_for_a_dialer_names_nobody() -> None:
    with mesh(2, live=False) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        table, node = made.table(0), made.nodes[1]
        host, port = silent.getsockname()
        deaf = msgspec.structs.replace(table.members[0], host=host, port=port)
        unanswered = msgspec.structs.replace(table, members={**table.members, 0: deaf})

        def act(what: str) -> None:
            if what == "open":
                with pytest.raises(Cancelled):
                    node.fabric.open(unanswered, 1, 30.0)
            elif what == "wait":
                with pytest.raises(Cancelled):
                    made.nodes[0].fabric.open(table, 0, 30.0)
            else:
                wait_until(lambda: node.fabric.unreached(0) == 0)
                wait_until(lambda: bool(made.nodes[0].fabric._attempts))
                assert (node.fabric.unreached(1), made.nodes[0].fabric.unreached(0)) == (-1, -1)
                for each in made.nodes:
                    each.fabric.close(0, "seen")

        together(["open", "wait", "look"], act)
        assert node.fabric.unreached(0) == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_closing_an_epoch_ends_its_opening(rank: int) -> None:
    with mesh(2, live=False) as made:
        node = made.nodes[rank]

        def act(what: str) -> None:
            if what == "open":
                with pytest.raises(Cancelled):
                    node.fabric.open(made.table(0), rank, 30.0)
            else:
                wait_until(lambda: bool(node.fabric._attempts))
                node.fabric.close(0, "test")

        began_s = time.monotonic()
        together(["open", "close"], act)
        assert time.monotonic() - began_s < 5
        with pytest.raises(Cancelled):
            node.fabric.open(made.table(0), rank, 30.0)


def connected(member: Member) -> socket.socket:
    return socket.create_connection((member.host, member.port), 5)


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            piece = sock.recv(4096)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece
