"""All-to-all: a link between any two members, which goes the way of all links when a rank is lost or replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Node, mesh, plan_of, together
from tests.transport.test_poison import in_backward
from tmd_worker.discard import StepDiscarded


def exchanged(node: Node) -> list[float]:
    size = node.world.size()
    output = torch.zeros(size)
    node.world.all_to_all_single(output, torch.arange(float(size)) + 10 * node.rank, [], []).wait()
    return output.tolist()


def parts(size: int) -> list[list[float]]:
    return [[10.0 * sender + rank for sender in range(size)] for rank in range(size)]


def test_an_all_to_all_opens_a_link_between_any_two_members_once() -> None:
    with mesh(5) as made:
        assert "world#direct" not in made.nodes[0].fabric.links()
        for _ in range(2):
            assert together(made.nodes, exchanged) == parts(5)
        links = {node.rank: sorted(node.fabric.links()["world#direct"]) for node in made.nodes}
    assert links == {rank: [peer for peer in range(5) if peer != rank] for rank in range(5)}


def test_values_are_valid_when_an_exchange_breaks_on_the_way() -> None:
    """1. Rank 0 exchanges with everybody. 2. Rank 2 never comes. 3. It gives up, and rank 0 gets its own values."""
    with mesh(3) as made:
        outputs = [torch.full((2,), -1) for _ in range(3)]
        work: Any = made.nodes[0].world.alltoall(outputs, [torch.full((2,), 7 + other) for other in range(3)])
        other: Any = made.nodes[1].world.alltoall([torch.zeros(2) for _ in range(3)], [torch.zeros(2) for _ in range(3)])
        assert not work.ended_within(0.1)
        made.nodes[2].events.poison(0, "test")
        for waiting in (work, other):
            assert waiting.ended_within(5)
            with pytest.raises(StepDiscarded):
                waiting.wait()
        assert [output.tolist() for output in outputs] == [[7, 7]] * 3
        assert in_backward(lambda: made.nodes[0].world.alltoall(outputs, outputs).wait()) is True
        with pytest.raises(StepDiscarded):
            made.nodes[0].world.recv_anysource([torch.zeros(1)], 0)


def test_after_recovery_and_after_a_flip_everybody_exchanges_again() -> None:
    """The links between any two are opened anew after a recovery; after a flip only those to the joiner are."""
    with mesh(4) as made:
        assert together(made.nodes, exchanged) == parts(4)
        made.nodes[2].events.poison(0, "test")
        for node in made.nodes:
            node.events.wait_poisoned()
        made.go_live(made.table(1))
        assert together(made.nodes, exchanged) == parts(4)
        before = made.nodes[0].fabric.links()["world#direct"]
        joiner = made.add("inc-j", 3)
        members = [*made.nodes[:3], joiner]
        plan = plan_of(made.table(2, r3=joiner), made.table(1), 3)
        together(members, lambda node: node.fabric.stage(plan, node.rank, 5.0))
        for node in made.nodes[:3]:
            node.fabric.switch(plan, 2)
        joiner.fabric.activate(2)
        for node in members:
            node.events.run_epoch = 2
        assert together(members, exchanged) == parts(4)
        after = made.nodes[0].fabric.links()["world#direct"]
        assert {peer: link for peer, link in after.items() if peer != 3} == {peer: before[peer] for peer in (1, 2)}
        assert after[3] != before[3]


@pytest.mark.parametrize("name", ["alltoall", "recv_anysource", "gather", "monitored_barrier"])
def test_after_the_vote_the_other_forms_are_refused_as_well(name: str) -> None:
    calls: dict[str, Any] = {
        "alltoall": lambda world: world.alltoall([torch.ones(1)] * 2, [torch.ones(1)] * 2),
        "recv_anysource": lambda world: world.recv_anysource([torch.ones(1)], 0),
        "gather": lambda world: world.gather([[torch.ones(1)] * 2], [torch.ones(1)], dist.GatherOptions()),
        "monitored_barrier": lambda world: world.monitored_barrier(),
    }
    with mesh(2) as made:
        made.nodes[0].events.voted = True
        with pytest.raises(RuntimeError, match=r"Move it before optimizer.step\(\).*session.log_only"):
            calls[name](made.nodes[0].world)
