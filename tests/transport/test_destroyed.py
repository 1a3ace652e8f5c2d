"""A destroyed group gives back its links, its inner group and its thread; nobody is blamed, and nobody waits for it in vain."""

from __future__ import annotations

import os
import signal
import statistics
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Node, mesh, plan_of, together, wait_until
from tests.transport.ranks import ALL_WAYS, DEADLINE_S, Rank, ranks, run_ranks
from tests.transport.test_switchover import LEAVER, flip, reduced
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd.protocol.membership import Membership
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.group import Group
from tmd_worker.transport.shell import TmdProcessGroup
from tmd_worker.transport.telling import Teller

ROUNDS = 200
#: Caches fill up first.
SETTLED_AFTER = 40
GONE = r"rank 0 has destroyed group 1: nothing more can be done on it"


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(samples: list[int]) -> float:
    """Over all samples together, by the slope of the line through them."""
    return statistics.linear_regression(range(len(samples)), samples).slope * len(samples)


def use(group: Any, number: int) -> None:
    """A collective, all-to-all or send/recv between the two members."""
    me = dist.get_rank()
    if number % 4 == 1:
        received = torch.empty(2)
        dist.all_to_all_single(received, torch.full((2,), float(me)), group=group)
        assert received.tolist() == [0.0, 1.0]
    elif number % 4 == 2:
        tensor = torch.full((3,), float(me))
        dist.send(tensor, 1, group=group) if me == 0 else dist.recv(tensor, 0, group=group)
        assert tensor.tolist() == [0.0] * 3
    else:
        total = torch.ones(10_000)
        dist.all_reduce(total, group=group)
        assert total[0].item() == 2.0


@ALL_WAYS
def test_groups_that_are_made_and_destroyed_again_and_again_leave_nothing(transport: TransportName, links: str) -> None:
    def body(rank: Rank) -> Any:
        before = held()
        samples = []
        for number in range(ROUNDS):
            group = dist.new_group([0, 1])
            use(group, number)
            dist.destroy_process_group(group)
            del group
            if number >= SETTLED_AFTER and number % 4 == 0:
                samples.append((*held(), resident_bytes()))
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        kept = set(rank.fabric.links()), len(rank.fabric._groups), len(rank.fabric._departures._left)
        return samples, kept, rank.events.broken, rank.events.died

    for samples, kept, broken, died in run_ranks(2, body, transport=transport, links=links):
        assert (broken, died) == ([], [])
        assert kept[0] <= {"0", "tmd.session", "tmd.buddy"}
        assert kept[1:] == (3, 0)
        descriptors, threads, memory = map(list, zip(*samples, strict=True))
        # one group that is just being given back comes and goes: of 160 kept, each would be two descriptors and a thread
        assert growth(descriptors) < 8, descriptors
        assert growth(threads) < 8, threads
        assert growth(memory) < 4 << 20, memory


@BOTH
@pytest.mark.parametrize("first", [0, 1])
def test_who_destroys_first_keeps_the_link_until_the_other_does(transport: TransportName, first: int) -> None:
    def body(rank: Rank) -> Any:
        before = held()
        group = dist.new_group([0, 1])
        total = torch.ones(300_000)
        dist.all_reduce(total, group=group)
        if rank.rank != first:
            rank.tell("made")
            rank.hear()
        dist.destroy_process_group(group)
        if rank.rank == first:
            left = rank.fabric._departures._left
            wait_until(lambda: bool(left) and not any(name == "tmd-group-1" for name in thread_names()))
            rank.tell("left")
            rank.hear()
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        dist.all_reduce(total)
        return total[0].item(), rank.events.broken

    with ranks(2, body, transport=transport) as processes:
        assert [process.hear() for process in processes] == (["left", "made"] if first == 0 else ["made", "left"])
        for process in processes:
            process.tell("go on")
        assert [process.hear() for process in processes] == [(4.0, [])] * 2


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@BOTH
@pytest.mark.parametrize("late", [False, True], ids=["called before", "called after"])
def test_a_collective_that_a_peer_will_never_call_fails_with_its_name_on_every_member(
    transport: TransportName, late: bool
) -> None:
    """Rank 3 of six has no link of the group to rank 0."""

    def body(rank: Rank) -> Any:
        group = dist.new_group(list(range(6)))
        dist.barrier(group=group)
        if rank.rank == 0:
            if not late:
                rank.tell("made")
                rank.hear()
            dist.destroy_process_group(group)
            if late:
                wait_until(lambda: "tmd-group-1" not in thread_names())
                rank.tell("left")
            said = ""
        else:
            if late:
                rank.tell("made")
                rank.hear()
            work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
            if not late:
                rank.tell("called")
            assert work is not None
            with pytest.raises(RuntimeError, match=GONE) as raised:
                work.wait()
            said = str(raised.value)
            with pytest.raises(RuntimeError, match=GONE):
                dist.barrier(group=group)
            with pytest.raises(RuntimeError, match=GONE):
                dist.send(torch.ones(1), (rank.rank + 1) % 6, group=group)
            dist.destroy_process_group(group)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), rank.events.broken, said.split(":")[0]

    with ranks(6, body, transport=transport) as processes:
        for process in processes:
            process.hear()
        for process in processes if late else processes[:1]:
            process.tell("go on")
        answers = [process.hear() for process in processes]
    assert [answer[:2] for answer in answers] == [(6.0, [])] * 6


@BOTH
def test_what_was_called_before_a_group_is_destroyed_is_done(transport: TransportName) -> None:
    """Nothing is waited for; rank 0 begins only once rank 1 has destroyed the group."""

    def body(rank: Rank) -> Any:
        group = dist.new_group([0, 1])
        rank.tell("made")
        rank.hear()
        tensors = [torch.full((200_000,), float(rank.rank + 1)) for _ in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        dist.destroy_process_group(group)
        rank.tell("destroyed")
        for work in works:
            assert work is not None
            work.wait()
        return [tensor.unique().tolist() for tensor in tensors], rank.events.broken

    with ranks(2, body, transport=transport) as processes:
        for process in processes:
            process.hear()
        for process in reversed(processes):
            process.tell("go on")
            assert process.hear() == "destroyed"
        assert [process.hear() for process in processes] == [([[3.0]] * 3, [])] * 2


@BOTH
def test_messages_sent_before_are_received_and_another_one_fails_with_the_name(transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        group = dist.new_group([0, 1])
        tensor = torch.full((500_000,), 7.0)
        if rank.rank == 0:
            rank.tell("made")
            for _ in range(2):
                dist.isend(tensor, 1, group=group)
            dist.destroy_process_group(group)
            return rank.events.broken
        got = []
        for _ in range(2):
            tensor = torch.zeros(500_000)
            dist.recv(tensor, 0, group=group)
            got.append(tensor.unique().tolist())
        assert got == [[7.0]] * 2
        with pytest.raises(RuntimeError, match=GONE):
            dist.recv(tensor, 0, group=group)
        rank.tell("received")
        return rank.events.broken

    with ranks(2, body, transport=transport) as processes:
        assert [process.hear() for process in processes] == ["made", "received"]
        assert [process.hear() for process in processes] == [[], []]


def test_a_link_for_messages_is_not_waited_for_once_the_peer_has_destroyed_the_group() -> None:
    def body(rank: Rank) -> Any:
        group = dist.new_group([0, 1])
        if rank.rank == 1:
            dist.destroy_process_group(group)
            wait_until(lambda: "tmd-group-1" not in thread_names())
            rank.tell("left")
            rank.hear()
        else:
            rank.hear()
            work = dist.irecv(torch.ones(1), 1, group=group)
            assert work is not None
            with pytest.raises(RuntimeError, match=r"rank 1 has destroyed group 1"):
                work.wait()
            dist.destroy_process_group(group)
        dist.barrier()
        return rank.events.broken

    with ranks(2, body) as processes:
        assert processes[1].hear() == "left"
        for process in processes:
            process.tell("go on")
        assert [process.hear() for process in processes] == [[], []]


def test_a_link_for_messages_that_is_opened_as_its_group_is_left_ends_as_all_others_do() -> None:
    """The end of which nobody holds would be seen by the watcher, and held against its peer."""
    opened = threading.Event()

    def setup(rank: Rank) -> None:
        if rank.rank == 0:
            open_pair = Fabric.open_pair

            def slowly(fabric: Fabric, group: Group, *arguments: Any, **options: Any) -> Any:
                link = open_pair(fabric, group, *arguments, **options)
                opened.set()
                wait_until(lambda: group.name not in fabric._groups)
                return link

            Fabric.open_pair = slowly  # type: ignore[method-assign]

    def body(rank: Rank) -> Any:
        before = held()
        group = dist.new_group([0, 1])
        if rank.rank == 0:
            work = dist.irecv(torch.ones(1), 1, group=group)
            assert work is not None
            assert opened.wait(DEADLINE_S)
            dist.destroy_process_group(group)
            with pytest.raises(RuntimeError, match="destroyed"):
                work.wait()
        else:
            dist.send(torch.ones(1), 0, group=group)
            wait_until(lambda: all(link.farewell for peers in rank.fabric.pairs.links().values() for link in peers.values()))
            dist.destroy_process_group(group)
        wait_until(lambda: not rank.fabric._departures._left)
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        dist.barrier()
        return rank.events.broken

    with ranks(2, body, setup=setup) as processes:
        assert [process.hear() for process in processes] == [[], []]


def test_a_message_of_a_member_that_has_left_since_is_received_however_late_its_link_is_taken_up() -> None:
    """1. Rank 1 opens the link. 2. Rank 0 sends, and leaves: its direction ends. 3. Only then rank 1 knows the link."""

    def setup(rank: Rank) -> None:
        if rank.rank == 1:
            open_pair = Fabric.open_pair

            def slowly(*arguments: Any, **options: Any) -> Any:
                link = open_pair(*arguments, **options)
                wait_until(link.hung_up)
                return link

            Fabric.open_pair = slowly  # type: ignore[method-assign]

    def body(rank: Rank) -> Any:
        group = dist.new_group([0, 1])
        tensor = torch.full((3,), 7.0 - rank.rank)
        dist.recv(tensor, 0, group=group) if rank.rank else dist.send(tensor, 1, group=group)
        dist.destroy_process_group(group)
        wait_until(lambda: not rank.fabric._departures._left)
        dist.barrier()
        return tensor.tolist(), rank.events.broken

    with ranks(2, body, setup=setup) as processes:
        assert [process.hear() for process in processes] == [([7.0] * 3, [])] * 2


@BOTH
@pytest.mark.parametrize("told", [False, True])
def test_a_rank_that_is_killed_while_it_leaves_is_noticed(transport: TransportName, told: bool) -> None:
    """Whether or not it has told the other one that it leaves."""

    def setup(rank: Rank) -> None:
        if rank.rank == 1:
            tell = Teller._tell

            def dying(*arguments: Any) -> bool:
                if told:
                    tell(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError

            Teller._tell = dying  # type: ignore[method-assign]

    def body(rank: Rank) -> Any:
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
        if rank.rank == 1:
            dist.destroy_process_group(group)
            return signal.pause()
        rank.events.wait_poisoned()
        dist.destroy_process_group(group)
        wait_until(lambda: not rank.fabric._departures._left and "1" not in rank.fabric._groups)
        return [(epoch, peer) for epoch, peer, _, _ in rank.events.broken[:1]]

    with ranks(2, body, setup=setup, transport=transport) as processes:
        assert processes[0].hear() == [(0, 1)]


# -------------------------------------------------------------------- openings after it


def make(nodes: list[Node], size: int, name: str = "1") -> dict[str, TmdProcessGroup]:
    """By incarnation."""

    def one(node: Node) -> TmdProcessGroup:
        group = TmdProcessGroup(node.fabric, node.rank, tuple(range(size)), DEADLINE_S)
        group._set_group_name(name)
        return group

    return dict(zip([node.incarnation for node in nodes], together(nodes, one), strict=True))


def check_all_fail(nodes: list[Node], groups: dict[str, TmdProcessGroup]) -> None:
    def fails(node: Node) -> None:
        with pytest.raises(RuntimeError, match="destroyed"):
            groups[node.incarnation].allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()

    together(nodes, fails)


@BOTH
@pytest.mark.parametrize("leaving", [(0,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_a_planned_move_does_not_wait_for_a_group_that_some_have_destroyed(
    transport: TransportName, leaving: tuple[int, ...]
) -> None:
    """The joiner's script has made it, too, and never destroys it."""
    with mesh(4, transport=transport) as made:
        before = made.nodes[:4]
        groups = make(before, 4)
        for rank in leaving:
            groups[f"inc-{rank}"].shutdown()
        joiner = made.add("inc-j", LEAVER)
        groups |= make([joiner], 4)
        stayers = [node for node in before if node.rank != LEAVER]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
        together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 20.0))
        flip(joiner, stayers, plan)
        after = [joiner, *stayers]
        assert together(after, reduced) == [[6.0] * 3] * 4
        for node in stayers:
            node.fabric.retire(1)
        check_all_fail(after, groups)
        for node in after:
            groups[node.incarnation].shutdown()
        nothing_is_left(after)
        assert together(after, reduced) == [[6.0] * 3] * 4
        assert all(node.events.broken == [] for node in after)


def nothing_is_left(nodes: list[Node]) -> None:
    wait_until(lambda: not any(node.fabric._departures._left or "1" in node.fabric._groups for node in nodes))
    assert not any(name.startswith("1") for node in nodes for name in node.fabric.links())


def test_what_a_rank_sent_before_it_destroyed_a_group_arrives_though_a_move_is_staged_meanwhile() -> None:
    """1. Rank 3 broadcasts, destroys the group, and is done with the step. 2. The joiner learns of it and gives the group up.
    3. Only then the others come to their part of the broadcast. (With gloo a root waits for the others.)"""

    def broadcast(group: TmdProcessGroup, value: float) -> float:
        options = dist.BroadcastOptions()
        options.rootRank = 3
        tensor = torch.full((1,), value)
        group.broadcast([tensor], options).wait()
        return tensor.item()

    with mesh(4) as made:
        before = made.nodes[:4]
        groups = make(before, 4)
        assert broadcast(groups["inc-3"], 7.0) == 7.0
        groups["inc-3"].shutdown()
        wait_until(lambda: "1" not in before[3].fabric._groups)
        joiner = made.add("inc-j", LEAVER)
        groups |= make([joiner], 4)
        stayers = [node for node in before if node.rank != LEAVER]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
        together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 20.0))
        wait_until(lambda: "1" not in joiner.fabric._groups)
        assert together(before[:3], lambda node: broadcast(groups[node.incarnation], 0.0)) == [7.0] * 3
        flip(joiner, stayers, plan)
        check_all_fail([joiner, *stayers], groups)
        assert together([joiner, *stayers], reduced) == [[6.0] * 3] * 4
        assert all(node.events.broken == [] for node in made.nodes)


@BOTH
def test_a_group_that_is_destroyed_while_a_move_is_staged_is_no_part_of_it(transport: TransportName) -> None:
    with mesh(4, transport=transport) as made:
        before = made.nodes[:4]
        groups = make(before, 4)
        joiner = made.add("inc-j", LEAVER)
        groups |= make([joiner], 4)
        stayers = [node for node in before if node.rank != LEAVER]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
        together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 20.0))
        for node in before:
            groups[node.incarnation].shutdown()
        flip(joiner, stayers, plan)
        after = [joiner, *stayers]
        assert together(after, reduced) == [[6.0] * 3] * 4
        check_all_fail([joiner], groups)
        groups[joiner.incarnation].shutdown()
        for node in stayers:
            node.fabric.retire(1)
        nothing_is_left(after)
        assert all(node.events.broken == [] for node in after)


@BOTH
@pytest.mark.parametrize("leaving", [(0,), (1,), (3,), (0, 1, 3)], ids=str)
def test_a_recovery_does_not_wait_for_a_group_that_some_have_destroyed(
    transport: TransportName, leaving: tuple[int, ...]
) -> None:
    with mesh(4, transport=transport) as made:
        before = made.nodes[:4]
        groups = make(before, 4)
        for rank in leaving:
            groups[f"inc-{rank}"].shutdown()
        joiner = made.add("inc-j", LEAVER)
        groups |= make([joiner], 4)
        before[LEAVER].fabric.close_all()
        survivors = [node for node in before if node.rank != LEAVER]
        for node in survivors:
            node.events.wait_poisoned()
        after = [joiner, *survivors]
        table = made.table(1, r2=joiner)
        together(after, lambda node: node.fabric.open(table, node.rank, 20.0))
        for node in after:
            node.fabric.activate(1)
            node.events.run_epoch = 1
        assert together(after, reduced) == [[6.0] * 3] * 4
        check_all_fail(after, groups)
        for node in after:
            groups[node.incarnation].shutdown()
        nothing_is_left(after)
        assert together(after, reduced) == [[6.0] * 3] * 4
        assert all(epoch == 0 for node in after for epoch, *_ in node.events.broken)


@BOTH
def test_a_group_that_is_destroyed_while_an_epoch_is_opened_is_no_part_of_it(transport: TransportName) -> None:
    """Nor do those that follow in the order wait for one another because of it."""
    with mesh(3, live=False, transport=transport) as made:
        groups = make(made.nodes, 3)
        behind = make(made.nodes, 3, "2")
        table = made.table(0)

        def act(what: Any) -> None:
            if isinstance(what, Node):
                if what.rank == 2:
                    wait_until(lambda: "1" not in made.nodes[0].fabric._groups)
                what.fabric.open(table, what.rank, 20.0)
            else:
                wait_until(lambda: bool(made.nodes[0].fabric._attempts))
                groups["inc-0"].shutdown()

        together([*made.nodes, "destroy"], act)
        for node in made.nodes:
            node.fabric.activate(0)
            node.events.run_epoch = 0
        assert together(made.nodes, reduced) == [[3.0] * 3] * 3
        together(made.nodes, lambda node: behind[node.incarnation].barrier(dist.BarrierOptions()).wait())
        for group in groups.values():
            group.shutdown()
        nothing_is_left(made.nodes)
        assert all(node.events.broken == [] for node in made.nodes)


def test_a_name_that_pytorch_gives_again_is_another_group() -> None:
    def body(rank: Rank) -> Any:
        names = []
        for _ in range(3):
            group = dist.new_group([0, 1], use_local_synchronization=True)
            dist.barrier(group=group)
            names.append((group.group_name, *(set(rank.fabric.links()) - {"0", "tmd.session", "tmd.buddy"})))
            dist.destroy_process_group(group)
        return names, rank.events.broken

    for names, broken in run_ranks(2, body):
        assert broken == []
        name = names[0][0]
        assert [name] * 3 == [each[0] for each in names]
        assert {f"{name}~1", f"{name}~2"} <= {label for each in names for label in each[1:]}


def test_an_epoch_that_ends_takes_what_is_left_of_destroyed_groups_along() -> None:
    with mesh(3) as made:
        groups = make(made.nodes, 3)
        groups["inc-0"].shutdown()
        wait_until(lambda: bool(made.nodes[0].fabric._departures._left))
        for node in made.nodes:
            node.events.poison(0, "test")
        assert not made.nodes[0].fabric._departures._left
        table = Membership(epoch=1, members=made.table(0).members)
        made.go_live(table)
        assert together(made.nodes, reduced) == [[3.0] * 3] * 3
        nothing_is_left(made.nodes)
