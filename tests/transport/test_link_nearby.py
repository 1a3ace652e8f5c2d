"""Links between processes of one host do not go through the network; neither what they carry nor how they end is another."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import mesh, together, wait_until
from tests.transport.ranks import JOB_KEY, Rank, ranks, run_ranks
from tmd_worker.transport import handshake, ports
from tmd_worker.transport.dialing import LinkError, dial
from tmd_worker.transport.handshake import LINK, Hello, new_nonce


def kinds_of_links(rank: Rank) -> set[str]:
    return {link.kind for links in rank.fabric.links().values() for link in links.values()}


def test_the_address_decides_and_the_kind_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(3, kinds_of_links, one_host=True) == [{"unix", "shm"}] * 3
    assert run_ranks(3, kinds_of_links, one_host=False) == [{"tcp"}] * 3
    for kind in ("unix", "tcp"):
        monkeypatch.setenv(ports.LOCAL_LINKS, kind)
        assert run_ranks(3, kinds_of_links, one_host=True) == [{kind}] * 3


def test_the_bits_do_not_depend_on_the_kind_of_link() -> None:
    def body(rank: Rank) -> list[bytes]:
        results = []
        for elements in (100, 50_000, 900_001):
            tensor = torch.randn(elements, generator=torch.Generator().manual_seed(rank.rank))
            dist.all_reduce(tensor)
            results.append(tensor.numpy().tobytes())
        return results

    results = [result for kind in ("tcp", "unix", "shm") for result in run_ranks(4, body, links=kind)]
    assert all(result == results[0] for result in results)


def test_an_address_that_exists_elsewhere_too_is_reached_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from another network namespace: nobody listens under the name there."""
    monkeypatch.setattr("tmd_worker.transport.listener._bind_nearby", lambda name: None)
    with mesh(2) as made:
        ends = [link.local[0] for links in made.nodes[1].fabric.links().values() for link in links.values()]
        assert set(ends) == {"127.0.0.1"}


def test_another_user_is_reached_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from another user namespace, which sees other numbers."""
    monkeypatch.setattr("tmd_worker.transport.network.is_same_user", lambda sock: False)
    with mesh(2) as made:
        ends = [link.local[0] for links in made.nodes[1].fabric.links().values() for link in links.values()]
        assert set(ends) == {"127.0.0.1"}


def test_another_user_within_the_host_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with mesh(1) as made, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        monkeypatch.setattr("tmd_worker.transport.network.is_same_user", lambda sock: False)
        stranger.settimeout(10)
        stranger.connect(handshake.nearby_name(JOB_KEY, made.nodes[0].fabric.host, made.nodes[0].fabric.port))
        assert stranger.recv(1) == b""


def test_a_stranger_who_finds_the_name_needs_the_key_as_well() -> None:
    with mesh(1) as made:
        node = made.nodes[0]
        name = handshake.nearby_name(JOB_KEY, node.fabric.host, node.fabric.port)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(name)
            hello = Hello(kind=LINK, incarnation="x", peer_incarnation="inc-0", nonce=new_nonce(), group="g", epoch=0, rank=1)
            stranger.sendall(handshake.seal_hello(b"another key", stranger.recv(handshake.GREETING_BYTES), hello))
            assert stranger.recv(1) == b""
        assert handshake.nearby_name(b"another key", node.fabric.host, node.fabric.port) != name
        with pytest.raises(LinkError, match="does not hold this job's key"):
            dial(node.member, b"another key", hello, time.monotonic() + 5, lambda _: None, nearby=True)


@pytest.mark.parametrize("links", ["unix", "shm"])
def test_a_killed_peer_is_noticed_at_once_by_those_who_wait_and_by_those_who_compute(links: str) -> None:
    def body(rank: Rank) -> Any:
        work = dist.all_reduce(torch.ones(500_000), async_op=True) if rank.rank == 0 else None
        rank.tell("ready")
        if rank.rank == 2:
            rank.hear()
        rank.events.wait_poisoned()
        assert work is None or work.get_future().wait() is not None
        return time.monotonic(), rank.events.broken

    with ranks(3, body, links=links) as processes:
        for process in processes:
            assert process.hear() == "ready"
        killed_s = time.monotonic()
        processes[2].kill()
        results = [processes[rank].hear() for rank in (0, 1)]
    for noticed_s, broken in results:
        assert noticed_s - killed_s < 5
        assert all(orderly == (peer != 2) for _, peer, orderly, _ in broken), broken
    assert any(peer == 2 for _, broken in results for _, peer, _, _ in broken)


@pytest.mark.parametrize("links", ["unix", "shm"])
def test_whoever_stops_reading_to_give_up_is_not_taken_for_dead_by_those_who_send(
    links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Rank 1 sends more than the connection takes. 2. Rank 0 gives up, and ceases to read before it can say STOP. 3. Its STOP
    is waited for."""
    monkeypatch.setenv(ports.LOCAL_LINKS, links)
    for _ in range(10):
        with mesh(2) as made:
            options = dist.BroadcastOptions()
            options.rootRank = 1
            work: Any = made.nodes[1].world.broadcast([torch.ones(4_000_000)], options)
            table = made.nodes[1].fabric._groups["world"].table
            assert table is not None
            wait_until(lambda links=table.links: links[0].state.unsent > 0)
            made.nodes[0].events.poison(0, "test")
            made.nodes[1].events.wait_poisoned()
            assert work.ended_within(5)
            assert all(orderly for _, _, orderly, _ in made.nodes[1].events.broken), made.nodes[1].events.broken


def test_many_groups_over_nearby_links_leave_nothing_behind() -> None:
    with mesh(4) as made:

        def reduced(node: Any) -> float:
            tensor = torch.ones(70_000)
            node.world.allreduce([tensor], dist.AllreduceOptions()).wait()
            return float(tensor.sum())

        for _ in range(20):
            assert together(made.nodes, reduced) == [280_000.0] * 4
