"""send/recv: any order of calls, any tags, any sender, links only between those who talk."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Mesh, Node, mesh, plan_of, together, wait_until
from tests.transport.ranks import Rank, run_ranks
from tmd_worker.discard import StepDiscarded
from tmd_worker.transport import mailbox
from tmd_worker.transport.work import Outcome


def test_a_group_is_its_own_backend_on_the_cpu() -> None:
    """PyTorch 2.14 asks for it in batch_isend_irecv, and for what it supports."""

    def body(rank: Rank) -> bool:
        group: Any = dist.group.WORLD
        with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
            group._get_backend(torch.device("cuda"))
        return group._get_backend(torch.device("cpu")) is group and not getattr(group, "supports_coalescing", False)

    assert run_ranks(1, body) == [True]


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


# -------------------------------------------------------------------- tags


def test_a_receive_that_waits_does_not_hold_up_one_with_another_tag() -> None:
    """1. Both receives are called, tag 5 first. 2. Only tag 6 is sent. 3. It arrives; the answer makes the sender send tag 5."""
    with mesh(2) as made:

        def body(node: Node) -> Any:
            if node.rank == 0:
                node.world.send([torch.full((2,), 6.0)], 1, 6).wait()
                node.world.recv([torch.zeros(1)], 1, 7).wait()
                node.world.send([torch.full((2,), 5.0)], 1, 5).wait()
                return None
            five, six = torch.zeros(2), torch.zeros(2)
            works = {tag: node.world.recv([tensor], 0, tag) for tag, tensor in ((5, five), (6, six))}
            works[6].wait()
            node.world.send([torch.zeros(1)], 0, 7).wait()
            works[5].wait()
            return five.tolist() + six.tolist()

        assert together(made.nodes, body)[1] == [5.0, 5.0, 6.0, 6.0]


def test_messages_that_nobody_waits_for_stay_with_their_sender() -> None:
    with mesh(2) as made:
        sender, receiver = made.nodes
        receiver.world.recv([torch.zeros(1)], 0, 1)
        sender.world.send([torch.ones(1)], 1, 1).wait()
        large: Any = sender.world.send([torch.ones(8_000_000)], 1, 2)
        assert not large.ended_within(0.1)
        target = torch.zeros(8_000_000)
        receiver.world.recv([target], 0, 2).wait()
        assert large.ended_within(10)
        assert bool(target.eq(1).all())


def test_a_sender_whose_messages_nobody_receives_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_KEPT_BYTES", 1000)
    with mesh(2) as made:
        sender, receiver = made.nodes
        receiver.world.recv([torch.zeros(1)], 0, 1)
        for _ in range(3):
            sender.world.send([torch.ones(100)], 1, 2)
        receiver.events.wait_poisoned()
        assert "sent more than 1000 bytes with tags that nobody receives" in receiver.events.broken[0][3]
        sender.events.wait_poisoned()


# -------------------------------------------------------------------- any sender


def test_a_receive_from_any_sender_takes_what_comes_first_and_names_the_sender() -> None:
    with mesh(4) as made:
        chosen = made.nodes[1]

        def hear() -> tuple[int, float]:
            tensor = torch.zeros(1)
            work: Any = chosen.world.recv_anysource([tensor], 3)
            work.wait()
            return work._source_rank(), tensor.item()

        def say(node: Node) -> None:
            node.world.send([torch.full((1,), 10.0 * node.rank)], 1, 3).wait()

        for sender in (3, 0, 2, 3):
            say(made.nodes[sender])
            assert hear() == (sender, 10.0 * sender)
        others = [node for node in made.nodes if node is not chosen]
        heard = together([*others, None], lambda node: say(node) if node else sorted(hear() for _ in range(3)))
        assert heard[-1] == [(0, 0.0), (2, 20.0), (3, 30.0)]
        links = {node.rank: sorted(node.fabric.links().get("world#pair", {})) for node in made.nodes}
        assert links == {0: [1], 1: [0, 2, 3], 2: [1], 3: [1]}


def test_a_receive_from_any_sender_leaves_other_tags_and_named_senders_alone() -> None:
    with mesh(3) as made:
        receiver = made.nodes[0]
        named, anybody, other = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        works: list[Any] = [
            receiver.world.recv([named], 1, 0),
            receiver.world.recv_anysource([anybody], 0),
            receiver.world.recv([other], 1, 8),
        ]
        for value, tag in ((1.0, 0), (2.0, 0), (3.0, 8)):
            made.nodes[1].world.send([torch.full((1,), value)], 0, tag).wait()
        for work in works:
            assert work.wait()
        assert [named.item(), anybody.item(), other.item()] == [1.0, 2.0, 3.0]


def test_nobody_is_to_blame_when_no_message_comes_from_anybody() -> None:
    with mesh(3, live=False) as made:
        for node in made.nodes:
            node.world._group.timeout_s = 3.0
        made.go_live(made.table(0))
        others = [node.world.send([torch.zeros(1)], 0, 1) for node in made.nodes[1:]]
        for _ in others:
            made.nodes[0].world.recv_anysource([torch.zeros(1)], 1).wait()
        work = made.nodes[0].world.recv_anysource([torch.zeros(1)], 2)
        with pytest.raises(RuntimeError, match="nobody sent a message with tag 2 within 3 s"):
            work.wait()
        assert made.nodes[0].events.poisoned_epoch == -1


def test_a_named_sender_that_is_silent_breaks_its_link_after_the_groups_timeout() -> None:
    with mesh(2, live=False) as made:
        for node in made.nodes:
            node.world._group.timeout_s = 3.0
        made.go_live(made.table(0))
        made.nodes[1].world.send([torch.zeros(1)], 0, 1)
        made.nodes[0].world.recv([torch.zeros(1)], 1, 1).wait()
        work = made.nodes[0].world.recv([torch.zeros(1)], 1, 2)
        with pytest.raises(StepDiscarded):
            work.wait()
        assert "was silent for 3 s" in made.nodes[0].events.broken[0][3]


def test_all_receives_end_when_the_epoch_is_closed_also_those_called_after_that() -> None:
    with mesh(3) as made:
        node = made.nodes[1]
        table = node.world._group.table
        works: list[Any] = [node.world.recv_anysource([torch.zeros(2)], 0), node.world.recv([torch.zeros(2)], 0, 0)]
        made.nodes[0].events.poison(0, "test")
        node.events.wait_poisoned()
        for work in works:
            assert work.ended_within(5)
            assert work.outcome is Outcome.DISCARDED
        node.world._group.table = table  # as it was for a call that was admitted just before
        node.events.run_epoch = 1
        late: Any = node.world.recv_anysource([torch.zeros(2)], 0)
        assert late.ended_within(5)
        assert late.outcome is Outcome.DISCARDED


# -------------------------------------------------------------------- over a flip


def flipped(made: Mesh) -> list[Node]:
    """The members after rank 2 was replaced."""
    joiner = made.add("inc-j", 2)
    members = [*made.nodes[:2], joiner]
    plan = plan_of(made.table(1, r2=joiner), made.table(0), 2)
    together(members, lambda node: node.fabric.stage(plan, node.rank, 5.0))
    for node in made.nodes[:2]:
        node.fabric.switch(plan, 1)
    joiner.fabric.activate(1)
    for node in members:
        node.events.run_epoch = 1
    return members


def passed_on(node: Node) -> list[float]:
    """Everybody sends to everybody; rank 0 does not know from whom it hears."""
    for peer in range(3):
        if peer != node.rank:
            node.world.send([torch.full((1,), float(node.rank))], peer, 4)
    heard = []
    for peer in range(3):
        if peer != node.rank:
            tensor = torch.zeros(1)
            work = node.world.recv([tensor], peer, 4) if node.rank else node.world.recv_anysource([tensor], 4)
            work.wait()
            heard.append(tensor.item())
    return sorted(heard)


def test_after_a_flip_the_joiner_is_heard_and_stayers_keep_their_link() -> None:
    with mesh(3) as made:
        assert together(made.nodes, passed_on) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]
        before = made.nodes[0].fabric.links()["world#pair"][1]
        members = flipped(made)
        assert together(members, passed_on) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]
        assert made.nodes[0].fabric.links()["world#pair"][1] == before
        for node in made.nodes[:2]:
            node.fabric.retire(1)
        assert together(members, passed_on) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]
        assert not any(node.events.broken for node in made.nodes[:2])


def test_a_receive_that_waits_over_a_flip_says_so_if_its_sender_is_replaced() -> None:
    with mesh(3) as made:
        works: list[Any] = [
            made.nodes[0].world.recv([torch.zeros(1)], 2, 1),
            made.nodes[0].world.recv_anysource([torch.zeros(1)], 2),
        ]
        kept: Any = made.nodes[0].world.recv([torch.zeros(1)], 1, 3)
        flipped(made)
        for work in works:
            with pytest.raises(RuntimeError, match="receive in the step in which is sent"):
                work.wait()
        made.nodes[1].world.send([torch.ones(1)], 0, 3).wait()
        assert kept.wait()


# -------------------------------------------------------------------- the barrier that says who is missing


def test_a_monitored_barrier_returns_once_all_have_come() -> None:
    with mesh(4) as made:
        for _ in range(3):
            together(made.nodes, lambda node: node.world.monitored_barrier(datetime.timedelta(seconds=20)))


@pytest.mark.parametrize(("wait_all_ranks", "named"), [(False, "ranks 1 of"), (True, "ranks 1, 3 of")])
def test_a_monitored_barrier_names_who_is_missing_and_the_next_one_is_not_confused(wait_all_ranks: bool, named: str) -> None:
    with mesh(4) as made:

        def come(node: Node) -> str:
            try:
                node.world.monitored_barrier(datetime.timedelta(seconds=2), wait_all_ranks)
            except RuntimeError as error:
                return str(error)
            return ""

        in_time = together([made.nodes[0], made.nodes[2]], come)
        late = together([made.nodes[1], made.nodes[3]], come)
        assert named in in_time[0]
        assert "did not reach monitored_barrier within 2.0 s" in in_time[0]
        assert all("rank 0 of the group let nobody go" in message for message in (in_time[1], *late))
        together(made.nodes, lambda node: node.world.monitored_barrier(datetime.timedelta(seconds=20)))


def test_a_monitored_barrier_is_given_up_like_any_other_call() -> None:
    with mesh(2) as made:

        def come(node: Node) -> None:
            with pytest.raises(StepDiscarded):
                node.world.monitored_barrier()

        made.nodes[1].events.poison(0, "test")
        together(made.nodes, come)
        made.nodes[0].fabric.sandbox = True
        made.nodes[0].world.monitored_barrier()


def test_a_pair_that_was_closed_on_poison_leaves_no_link() -> None:
    with mesh(3) as made:
        together(made.nodes, passed_on)
        made.nodes[0].events.poison(0, "test")
        for node in made.nodes:
            node.events.wait_poisoned()
            wait_until(lambda node=node: "world#pair" not in node.fabric.links())  # type: ignore[misc]


def test_a_link_that_only_one_side_has_opened_before_a_flip_is_used_after_it() -> None:
    """1. Rank 1 dials rank 0, which has no use for that yet. 2. Rank 2 is replaced. 3. Rank 0 sends to rank 1."""
    with mesh(3) as made:
        tensor = torch.zeros(1)
        work: Any = made.nodes[1].world.recv([tensor], 0, 1)
        wait_until(lambda: "world#pair" in made.nodes[1].fabric.links())
        flipped(made)
        made.nodes[0].world.send([torch.full((1,), 5.0)], 1, 1).wait()
        assert work.wait()
        assert tensor.item() == 5.0


def test_a_named_peer_that_never_wants_to_talk_breaks_the_epoch_and_any_peer_does_not() -> None:
    with mesh(3, live=False) as made:
        for node in made.nodes:
            node.world._group.timeout_s = 2.0
        made.go_live(made.table(0))
        node = made.nodes[0]
        anybody: Any = node.world.recv_anysource([torch.zeros(1)], 0)
        with pytest.raises(RuntimeError, match=r"nobody sent|did not open its link"):
            anybody.wait()
        assert node.events.poisoned_epoch == -1
        named: Any = node.world.recv([torch.zeros(1)], 1, 0)
        with pytest.raises(StepDiscarded):
            named.wait()
        assert "did not open its link of group world#pair in time" in node.events.broken[0][3]
