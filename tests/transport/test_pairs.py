"""send/recv: any order of calls, any tags, links only between those who talk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Node, mesh, together
from tests.transport.ranks import Rank, run_ranks


def test_both_sides_may_send_first_even_when_it_does_not_fit_the_buffers() -> None:
    def body(rank: Rank) -> list[Any]:
        peer = 1 - rank.rank
        mine = torch.full((3_000_000,), float(rank.rank + 1))
        theirs = torch.empty(3_000_000)
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return sorted(set(theirs.tolist()))

    assert run_ranks(2, body) == [[2.0], [1.0]]


def test_messages_are_matched_by_tag() -> None:
    def body(rank: Rank) -> list[Any]:
        if rank.rank == 0:
            for tag in (1, 2, 3):
                dist.send(torch.full((4,), tag), 1, tag=tag)
            return []
        received = {}
        for tag in (3, 1, 2):
            tensor = torch.zeros(4, dtype=torch.int64)
            dist.recv(tensor, 0, tag=tag)
            received[tag] = tensor.tolist()
        return [received[tag] for tag in (1, 2, 3)]

    assert run_ranks(2, body)[1] == [[1] * 4, [2] * 4, [3] * 4]


def test_a_pair_link_is_opened_when_it_is_first_used() -> None:
    with mesh(4) as made:
        assert "world#pair" not in made.nodes[1].fabric.links()

        def exchange(node: Node) -> None:
            tensor = torch.ones(2)
            if node.rank == 1:
                node.world.send([tensor], 3, 0).wait()
            elif node.rank == 3:
                node.world.recv([tensor.zero_()], 1, 0).wait()
                assert tensor.tolist() == [1.0, 1.0]

        together(made.nodes, exchange)
        pairs = {node.rank: list(node.fabric.links().get("world#pair", {})) for node in made.nodes}
    assert pairs == {0: [], 1: [3], 2: [], 3: [1]}


def test_a_message_of_another_size_is_refused_and_the_next_one_arrives() -> None:
    with mesh(2) as made:

        def body(node: Node) -> Any:
            if node.rank == 0:
                node.world.send([torch.ones(3)], 1, 0).wait()
                node.world.send([torch.full((2,), 7.0)], 1, 0).wait()
                return None
            tensor = torch.zeros(2)
            with pytest.raises(RuntimeError, match="has 12 bytes, the tensor to receive into 8"):
                node.world.recv([tensor], 0, 0).wait()
            node.world.recv([tensor], 0, 0).wait()
            return tensor.tolist()

        assert together(made.nodes, body)[1] == [7.0, 7.0]


def test_waiting_senders_and_receivers_end_when_the_epoch_is_closed() -> None:
    with mesh(2) as made:
        lower, higher = made.nodes
        works: list[Any] = [lower.world.recv([torch.zeros(2)], 1, 0), higher.world.recv([torch.zeros(2)], 0, 0)]
        lower.events.poison(0, "test")
        higher.events.wait_poisoned()
        for work in works:
            assert work.ended_within(5)
