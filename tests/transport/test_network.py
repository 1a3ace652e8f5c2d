"""Links over IPv6, in a range of ports, past firewalls and hosts that vanish: what a network may do to a job."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import mesh, plan_of, together
from tests.transport.ranks import DEADLINE_S, JOB_KEY, Events, Rank, ranks, run_ranks
from tests.transport.starving import no_descriptor_left
from tests.transport.test_switchover import flip, reduced
from tmd.protocol.membership import Member
from tmd_worker.transport import network, ports
from tmd_worker.transport.dialing import CannotConnect, LinkError, dial
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.handshake import LINK, Hello, new_nonce
from tmd_worker.transport.listener import CannotListen

HOST = "127.0.0.9"
TCP_OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


def dial_to(host: str, port: int, deadline_s: float = 5.0) -> str:
    """The error of somebody who wants a link to that port."""
    member = Member(incarnation="inc-7", node="n7", host=host, port=port)
    hello = Hello(kind=LINK, incarnation="inc-8", peer_incarnation="inc-7", nonce=new_nonce())
    with pytest.raises(LinkError) as raised:
        dial(member, JOB_KEY, hello, time.monotonic() + deadline_s, lambda _: None)
    return str(raised.value)


# -------------------------------------------------------------------- IPv6


@pytest.mark.parametrize("links", ["shm", "unix", "tcp"])
def test_ranks_train_over_ipv6_with_the_bits_of_ipv4(links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ports.LOCAL_LINKS, links)

    def body(rank: Rank) -> tuple[set[str], bytes]:
        tensor = torch.randn(70_001, generator=torch.Generator().manual_seed(rank.rank))
        dist.all_reduce(tensor)
        ends = {end for by_peer in rank.fabric.links().values() for link in by_peer.values() for end in (link.local, link.remote)}
        return {"within the host" if host.startswith("@") else host for host, _ in ends}, tensor.numpy().tobytes()

    over_ipv6 = run_ranks(3, body, address="::1")
    over_ipv4 = run_ranks(3, body, address=HOST)
    assert [ends for ends, _ in over_ipv6] == [{"::1" if links == "tcp" else "within the host"}] * 3
    assert {bits for _, bits in over_ipv6} == {bits for _, bits in over_ipv4}


def test_other_connections_go_over_ipv6_too() -> None:
    with mesh(2, live=False, host="::1") as made:
        server, client = made.nodes
        server.fabric.serve("state", lambda sock, fields: (sock.sendall(b"here"), sock.close())[1])
        with client.fabric.connect(server.member, "state", {}, 5.0) as sock:
            assert sock.family is socket.AF_INET6
            assert sock.recv(4, socket.MSG_WAITALL) == b"here"


def test_inner_groups_are_made_and_replaced_over_ipv6() -> None:
    with mesh(3, host="::1", transport="gloo") as made:
        assert together(made.nodes, reduced) == [[3.0] * 3] * 3
        joiner, stayers = made.add("inc-j", 2), made.nodes[:2]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), 2)
        together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, DEADLINE_S))
        flip(joiner, stayers, plan)
        assert together([joiner, *stayers], reduced) == [[3.0] * 3] * 3


# -------------------------------------------------------------------- ports


@contextmanager
def listening(port_range: tuple[int, int]) -> Iterator[Fabric]:
    events = Events()
    fabric = Fabric(host=HOST, job_key=JOB_KEY, incarnation="inc-0", events=events, port_range=port_range)
    events.fabric = fabric
    try:
        yield fabric
    finally:
        fabric.close_all()


@pytest.fixture
def free_range() -> tuple[int, int]:
    """Two neighbouring ports that nobody listens on, below those that the kernel gives out by itself."""
    lowest_given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for first in range(lowest_given_out - 2, 1024, -2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind((HOST, first))
                other.bind((HOST, first + 1))
            except OSError:
                continue
            return first, first + 1
    raise AssertionError("no two neighbouring ports are free")


def test_listeners_stay_in_their_range_and_say_when_it_is_used_up(free_range: tuple[int, int]) -> None:
    first, last = free_range
    with listening(free_range) as one, listening(free_range) as other:
        assert {one.port, other.port} == {first, last}
        with pytest.raises(CannotListen, match=f"no port of {first}-{last} on {HOST} is free .* wider --port-range"):
            Fabric(host=HOST, job_key=JOB_KEY, incarnation="inc-2", events=Events(), port_range=free_range)


def test_a_port_is_free_again_as_soon_as_its_listener_is_gone(free_range: tuple[int, int]) -> None:
    """Also while the kernel remembers a connection that the listener's side has closed."""
    first, _ = free_range
    with listening((first, first)) as fabric:
        client = socket.create_connection((HOST, first), 5)
        assert client.recv(4, socket.MSG_WAITALL) == b"TMDL"
        assert fabric.port == first
    assert client.recv(64, socket.MSG_WAITALL)  # the rest of the greeting, then the end, which came first from the other side
    client.close()
    with listening((first, first)) as fabric:
        assert fabric.port == first


def test_an_address_that_the_machine_has_lost_is_named() -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 203.0.113.9 \(Cannot assign .* --host or --interface"):
        Fabric(host="203.0.113.9", job_key=JOB_KEY, incarnation="inc-0", events=Events())


# -------------------------------------------------------------------- firewalls


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_refused_connection_names_host_and_port(host: str) -> None:
    with socket.socket(network.family(host)) as silent:
        silent.bind((host, 0))
        port = silent.getsockname()[1]
        text = dial_to(host, port)
    assert f"inc-7 on n7: port {port} on {host}: connection refused" in text
    assert "a firewall rejects the port" in text


def test_a_dropped_connection_names_host_and_port_and_what_to_check() -> None:
    """The kernel drops what comes to a listener whose queue is full, as a firewall would."""
    with socket.socket() as full:
        full.bind((HOST, 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            assert client.connect_ex((HOST, port)) == errno.EINPROGRESS
        text = dial_to(HOST, port, deadline_s=0.3)
        for client in waiting:
            client.close()
    assert f"port {port} on {HOST}: connection timed out: is it reachable from this node?" in text
    assert "tmd-run --port-range FIRST-LAST fixes the ports" in text


# -------------------------------------------------------------------- descriptors


def test_a_rank_without_a_free_descriptor_says_so_and_what_to_do_and_is_reached_once_it_has_some() -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

    def body(rank: Rank) -> str:
        peer = rank.table.members[1 - rank.rank]
        rank.fabric.serve("state", lambda sock, fields: (sock.sendall(b"here"), sock.close())[1])
        if rank.rank:
            assert rank.hear() == "none is left there"
            with pytest.raises(LinkError, match="no answer in time"):
                rank.fabric.connect(peer, "state", {}, 0.5)
            rank.tell("unanswered")
            assert rank.hear() == "some are left there"
        else:
            logging.getLogger("tmd_worker").addHandler(handler)
            with no_descriptor_left():
                with pytest.raises(CannotConnect, match=r"cannot open a socket \(Too many open files\).*ulimit -n"):
                    rank.fabric.connect(peer, "state", {}, 5.0)
                rank.tell("none is left")
                assert rank.hear() == "go on"
                assert len(said) == 1, said
            rank.tell("some are left")
        dist.all_reduce(torch.ones(3))  # the links of before still carry
        with rank.fabric.connect(peer, "state", {}, DEADLINE_S) as sock:
            assert sock.recv(4, socket.MSG_WAITALL) == b"here"
        return "".join(said)

    with ranks(2, body, one_host=True) as processes:
        assert processes[0].hear() == "none is left"
        processes[1].tell("none is left there")
        assert processes[1].hear() == "unanswered"
        processes[0].tell("go on")
        assert processes[0].hear() == "some are left"
        processes[1].tell("some are left there")
        assert "cannot take connections (Too many open files)" in processes[0].hear()
        assert processes[1].hear() == ""


# -------------------------------------------------------------------- hosts that vanish


def test_both_ends_of_every_link_ask_whether_the_other_host_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the kernel ends a connection then is its own part, and takes the loss of a host; asserted is that it was told to."""
    monkeypatch.setenv(ports.LOCAL_LINKS, "tcp")
    with mesh(2) as made:
        links = [link for node in made.nodes if node.fabric._standing.live for link in node.fabric._standing.live.all_links()]
        assert len(links) == 2 * len(made.nodes[0].fabric.links())
        for link in links:
            assert link.stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [link.stream.sock.getsockopt(socket.IPPROTO_TCP, option) for option in TCP_OPTIONS] == [10, 5, 4, 0]
