"""Planned moves: only links to the joiner are opened, stayers keep theirs, and a dropped plan leaves no trace."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Mesh, Node, mesh, plan_of, together, wait_until
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd.protocol.membership import Plan
from tmd_worker.core.ballot import Ballot
from tmd_worker.discard import StepDiscarded
from tmd_worker.transport.fabric import Cancelled, LinkError
from tmd_worker.transport.shell import TmdProcessGroup
from tmd_worker.transport.topology import buddy_neighbours, collective_neighbours, next_hop, tree_neighbours

LEAVER = 2


def reduced(node: Node) -> list[float]:
    tensor = torch.full((3,), float(node.rank))
    node.world.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor.tolist()


def staged(made: Mesh) -> tuple[Node, list[Node], Plan]:
    """Rank 2's joiner and the stayers have their links for epoch 1 ready."""
    joiner = made.add("inc-j", LEAVER)
    stayers = [node for node in made.nodes[: made.size] if node.rank != LEAVER]
    plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
    together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 5.0))
    return joiner, stayers, plan


def flip(joiner: Node, stayers: list[Node], plan: Plan) -> None:
    for node in stayers:
        node.fabric.switch(plan, 1)
        node.events.run_epoch = 1
    joiner.fabric.activate(1)
    joiner.events.run_epoch = 1


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_stayers_keep_the_descriptors_of_all_links_to_one_another(size: int) -> None:
    with mesh(size) as made:
        before = {node.rank: node.fabric.links() for node in made.nodes}
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)
        members = [joiner, *stayers]
        assert together(members, reduced) == [[float(sum(range(size)))] * 3] * size
        for node in stayers:
            after = node.fabric.links()
            for group, links in before[node.rank].items():
                kept = {peer: link for peer, link in links.items() if peer != LEAVER}
                assert {peer: link for peer, link in after[group].items() if peer != LEAVER} == kept
                if LEAVER in links:
                    assert after[group][LEAVER].remote != links[LEAVER].remote
        assert all(node.events.broken == [] for node in made.nodes)


@BOTH
def test_no_link_between_stayers_is_opened_anew(transport: TransportName) -> None:
    with mesh(5, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        assert [node.fabric.switch(plan, 1) for node in stayers] == [0] * 4
        assert joiner.fabric.activate(1) == 0


def test_a_link_between_stayers_that_is_opened_anew_is_counted() -> None:
    """The plan names rank 3 as a leaver, too, though its process stays: the others open their links to it again."""
    with mesh(4) as made:
        joiner = made.add("inc-j", LEAVER)
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER, 3)
        before = [sum(3 in links for links in node.fabric.links().values()) for node in made.nodes[:2]]
        together([joiner, *made.nodes[:2], made.nodes[3]], lambda node: node.fabric.stage(plan, node.rank, 5.0))
        assert [node.fabric.switch(plan, 1) for node in made.nodes[:2]] == before
        assert all(before)


def test_every_link_that_a_recovery_opens_anew_is_counted_but_those_to_the_joiner() -> None:
    with mesh(4) as made:
        to_stayers = [
            sum(peer != LEAVER for links in node.fabric.links().values() for peer in links)
            for node in made.nodes
            if node.rank != LEAVER
        ]
        joiner = made.add("inc-j", LEAVER)
        members = [joiner, *(node for node in made.nodes[:4] if node.rank != LEAVER)]
        for node in made.nodes[:4]:
            node.events.poison(0, "test")
        together(members, lambda node: node.fabric.open(made.table(1, r2=joiner), node.rank, 5.0))
        assert [node.fabric.activate(1) for node in members] == [0, *to_stayers]


def test_a_stayer_opens_links_to_the_joiner_only_and_only_where_it_is_a_neighbour() -> None:
    with mesh(8) as made:
        joiner = made.add("inc-j", LEAVER)
        stayers = [node for node in made.nodes[:8] if node.rank != LEAVER]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
        opened = together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 5.0))
    # rank 2 has ring neighbours 1, 3 and tree neighbours 0, 5, 6; the vote's tree 0, 5, 6; buddy 3, ward 1
    assert dict(zip([LEAVER, *(node.rank for node in stayers)], opened, strict=True)) == {
        LEAVER: 10,
        0: 2,
        1: 2,
        3: 2,
        4: 0,
        5: 2,
        6: 2,
        7: 0,
    }


@BOTH
def test_the_leavers_links_close_at_retirement_and_not_before(transport: TransportName) -> None:
    with mesh(4, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)
        leaver = made.nodes[LEAVER]
        assert not any(link.hung_up() for link in leaver.fabric._standing.live.all_links())  # type: ignore[union-attr]
        for node in stayers:
            node.fabric.retire(1)
        leaver.events.wait_poisoned(0)
        assert together([joiner, *stayers], reduced) == [[6.0] * 3] * 4
        assert all(node.events.broken == [] for node in (joiner, *stayers))


@BOTH
def test_a_leaver_that_dies_after_the_flip_disturbs_nobody(transport: TransportName) -> None:
    with mesh(4, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)
        made.nodes[LEAVER].fabric.close_all()
        assert together([joiner, *stayers], reduced) == [[6.0] * 3] * 4
        assert all(node.events.broken == [] for node in (joiner, *stayers))


@BOTH
def test_a_joiner_that_dies_before_the_flip_is_noticed_after_it_and_not_before(transport: TransportName) -> None:
    with mesh(3, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        joiner.fabric.close_all()
        assert together(made.nodes[:3], reduced) == [[3.0] * 3] * 3
        assert all(node.events.broken == [] for node in stayers)
        for node in stayers:
            node.fabric.switch(plan, 1)
        for node in stayers:
            node.events.wait_poisoned(1)


@BOTH
def test_links_are_staged_and_dropped_beside_running_collectives(transport: TransportName) -> None:
    with mesh(4, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        fds = [node.fabric.links() for node in made.nodes[:4]]
        descriptors = len(os.listdir("/proc/self/fd"))
        for node in (joiner, *stayers):
            node.fabric.drop_staged(plan.plan_id)
        assert [node.fabric.links() for node in made.nodes[:4]] == fds
        assert together(made.nodes[:4], reduced) == [[6.0] * 3] * 4
        wait_until(lambda: len(os.listdir("/proc/self/fd")) < descriptors - 10)
        again = plan_of(plan.successor, made.table(0), LEAVER, plan_id=2)
        together([joiner, *stayers], lambda node: node.fabric.stage(again, node.rank, 5.0))
        flip(joiner, stayers, again)
        assert together([joiner, *stayers], reduced) == [[6.0] * 3] * 4


@BOTH
def test_dropping_a_plan_ends_its_staging(transport: TransportName) -> None:
    with mesh(2, transport=transport) as made:
        joiner = made.add("inc-j", 1)
        plan = plan_of(made.table(1, r1=joiner), made.table(0), 1)

        def act(what: str) -> None:
            if what == "drop":
                wait_until(lambda: bool(made.nodes[0].fabric._attempts))
                made.nodes[0].fabric.drop_staged(plan.plan_id)
                return
            with pytest.raises(Cancelled):
                made.nodes[0].fabric.stage(plan, 0, 30.0)

        together(["stage", "drop"], act)
        assert together(made.nodes[:2], reduced) == [[1.0] * 3] * 2


@BOTH
def test_poison_of_the_base_epoch_leaves_what_is_staged_to_the_plan(transport: TransportName) -> None:
    with mesh(3, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        made.nodes[0].events.poison(0, "test")
        for node in made.nodes[:3]:
            node.events.wait_poisoned(0)
        assert made.nodes[0].fabric._standing.staged
        made.nodes[0].fabric.close(1, "the plan's epoch too")
        assert not made.nodes[0].fabric._standing.staged
        for node in (joiner, *stayers):
            node.fabric.drop_staged(plan.plan_id)
        made.go_live(made.table(2))
        assert together(made.nodes[:3], reduced) == [[3.0] * 3] * 3


@BOTH
def test_the_leaver_cannot_come_back_into_the_new_epoch(transport: TransportName) -> None:
    with mesh(3, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)
        leaver = made.nodes[LEAVER]
        for node in stayers:
            node.fabric.retire(1)
        leaver.events.wait_poisoned(0)
        with pytest.raises(LinkError, match=r"rank 0 refused a link .*in epoch 1 rank 2 is not inc-2"):
            leaver.fabric.open(made.table(1), LEAVER, 5.0)


@BOTH
def test_the_vote_goes_on_with_the_joiner_and_without_the_leaver(transport: TransportName) -> None:
    with mesh(4, transport=transport) as made:
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)

        def vote(node: Node) -> Any:
            return node.fabric.vote(Ballot.single(epoch=1, step=4), 5.0)

        results = together([joiner, *stayers], vote)
        assert all(result == (Ballot(1, 1, 4, 4, 0, 0, False, 0), True) for result in results)
        assert made.nodes[LEAVER].fabric.vote(Ballot.single(epoch=1, step=4), 5.0) == (None, False)


@BOTH
def test_pair_links_between_stayers_survive_and_the_leavers_is_replaced_on_demand(transport: TransportName) -> None:
    with mesh(3, transport=transport) as made:

        def talk(node: Node, other: int) -> float:
            tensor = torch.full((1,), float(node.rank))
            if node.rank > other:
                node.world.send([tensor], other, 0).wait()
            else:
                node.world.recv([tensor], other, 0).wait()
            return float(tensor)

        pairs = {0: 1, 1: 0}
        assert together(made.nodes[:2], lambda node: talk(node, pairs[node.rank])) == [1.0, 1.0]
        assert together([made.nodes[0], made.nodes[2]], lambda node: talk(node, 2 - node.rank)) == [2.0, 2.0]
        kept = made.nodes[0].fabric.links()["world#pair"][1]
        joiner, stayers, plan = staged(made)
        flip(joiner, stayers, plan)
        assert together(made.nodes[:2], lambda node: talk(node, pairs[node.rank])) == [1.0, 1.0]
        assert together([made.nodes[0], joiner], lambda node: talk(node, 2 - node.rank)) == [2.0, 2.0]
        links = made.nodes[0].fabric.links()["world#pair"]
        assert links[1] == kept
        assert links[2].remote[1] != made.nodes[LEAVER].fabric.port


@BOTH
def test_a_standby_takes_another_role_in_place(transport: TransportName) -> None:
    with mesh(3, transport=transport) as made:
        standby = made.add("inc-s", 2)
        standby.fabric.set_role(1, 3, 1)
        standby.rank = 1
        assert standby.world.rank() == 1
        made.nodes[0].events.poison(0, "test")
        for node in made.nodes[:3]:
            node.events.wait_poisoned(0)
        members = [made.nodes[0], standby, made.nodes[2]]
        made.go_live(made.table(1, r1=standby), members)
        assert together(members, reduced) == [[3.0] * 3] * 3


def test_a_role_that_a_group_was_not_built_for_is_refused_by_name() -> None:
    refusal = r"cannot become rank 7: its group tmd.session was built for ranks \[0, 1\]"
    with mesh(2) as made, pytest.raises(ValueError, match=refusal):
        made.nodes[0].fabric.set_role(7, 2, 1)


@BOTH
def test_making_a_group_while_a_link_breaks_discards_the_step(transport: TransportName) -> None:
    with mesh(2, transport=transport) as made:
        raised = []

        def make() -> None:
            late = TmdProcessGroup(made.nodes[0].fabric, 0, (0, 1), 5.0)
            try:
                late._set_group_name("late")
            except StepDiscarded as discarded:
                raised.append(str(discarded))

        thread = threading.Thread(target=make)
        thread.start()
        wait_until(lambda: bool(made.nodes[0].fabric._attempts))
        made.nodes[0].events.poison(0, "test")
        thread.join(5)
        assert raised == ["a link broke while group late was being made"]


@BOTH
def test_making_a_group_when_a_member_cannot_be_reached_discards_the_step_too(transport: TransportName) -> None:
    """Whoever notices a death by making a group must not take it for an error of the script."""
    with mesh(2, transport=transport) as made:
        lower, higher = made.nodes
        lower.fabric._ports.close()
        wait_until(lambda: not any(thread.name == "tmd-listener" and thread.is_alive() for thread in lower.fabric._threads))
        with pytest.raises(StepDiscarded):
            TmdProcessGroup(higher.fabric, 1, (0, 1), 5.0)._set_group_name("late")
        assert higher.events.broken[0][:2] == (0, 0)


@pytest.mark.parametrize("size", range(1, 20))
def test_neighbours_are_mutual_and_every_hop_leads_to_the_root(size: int) -> None:
    for rank in range(size):
        for neighbour in collective_neighbours(rank, size):
            assert rank in collective_neighbours(neighbour, size)
        for neighbour in buddy_neighbours(rank, size, 2):
            assert rank in buddy_neighbours(neighbour, size, 2)
        for root in set(range(size)) - {rank}:
            at, hops = rank, 0
            while at != root:
                hop = next_hop(at, root)
                assert hop in tree_neighbours(at, size)
                at, hops = hop, hops + 1
                assert hops <= size
