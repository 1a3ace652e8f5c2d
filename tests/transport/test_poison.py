"""A rank that dies or gives up is noticed at once, nobody is left waiting, and nothing stale is taken for data."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Mesh, Node, mesh, plan_of, together, wait_until
from tests.transport.ranks import Rank, ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd_worker import faults
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import Admission
from tmd_worker.discard import StepDiscarded
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.wire import HEADER, MAGIC, Kind
from tmd_worker.transport.work import Outcome

SURVIVORS = (0, 1, 3)


def all_reduce(node: Node, tensor: torch.Tensor) -> Any:
    return node.world.allreduce([tensor], dist.AllreduceOptions())


@pytest.mark.parametrize("links", ["tcp", "unix", "shm"])
def test_a_rank_killed_in_the_middle_of_a_frame(links: str) -> None:
    """1. Rank 2 dies with half of a payload sent. 2. The others' works end, each sees a broken link or a STOP. 3. wait raises."""

    def setup(rank: Rank) -> None:
        if rank.rank == 2:
            faults.arm('[{"point": "frame", "rank": 2, "action": "kill", "count": 7}]')

    def body(rank: Rank) -> Any:
        works, raised = [], 0
        try:
            for _ in range(3):
                works.append(dist.all_reduce(torch.ones(1_000_000), async_op=True))
        except StepDiscarded:
            raised += 1  # it was noticed before this call
        for work in works:
            try:
                work.wait()
            except StepDiscarded:
                raised += 1
        return raised, all(work.get_future().done() for work in works), rank.events.broken

    with ranks(4, body, setup=setup, links=links) as processes:
        results = {rank: processes[rank].hear() for rank in SURVIVORS}
    for raised, done, broken in results.values():
        assert raised >= 1
        assert done
        assert broken
    broken = [entry for _, _, entries in results.values() for entry in entries]
    assert any(peer == 2 and not orderly for _, peer, orderly, _ in broken)
    assert not any(peer != 2 and not orderly for _, peer, orderly, _ in broken), broken


@BOTH
def test_a_death_is_noticed_while_everybody_only_computes(transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        rank.tell("computing")
        rank.events.wait_poisoned()
        return time.monotonic(), rank.events.broken

    with ranks(4, body, transport=transport) as processes:
        for process in processes:
            assert process.hear() == "computing"
        killed_s = time.monotonic()
        processes[2].kill()
        results = [processes[rank].hear() for rank in SURVIVORS]
    assert max(noticed_s for noticed_s, _ in results) - killed_s < 1.0
    for _, broken in results:
        assert all(orderly == (peer != 2) for _, peer, orderly, _ in broken), broken


@BOTH
def test_whoever_gives_up_says_stop_and_is_not_taken_for_dead(transport: TransportName) -> None:
    with mesh(5, transport=transport) as made:
        made.nodes[3].events.poison(0, "test")
        for node in made.nodes:
            node.events.wait_poisoned()
        broken = [entry for node in made.nodes for entry in node.events.broken]
    assert broken
    assert all(orderly for _, _, orderly, _ in broken), broken


@BOTH
def test_close_wakes_everyone(transport: TransportName) -> None:
    """A collective that nobody joins, a vote, a record that does not come: all end, and nothing raises in a thread."""
    with mesh(4, transport=transport) as made:
        small = 5 if transport == "delta" else 100_000  # gloo ends the process when sizes differ
        works = [all_reduce(made.nodes[0], torch.ones(small)), all_reduce(made.nodes[1], torch.ones(100_000))]
        waits: dict[str, Any] = {}

        def vote() -> None:
            waits["vote"] = made.nodes[2].fabric.vote(Ballot.single(epoch=0, step=0), 30.0)

        def record() -> None:
            waits["record"] = made.nodes[3].fabric.buddy.wait_for(0, 30.0)

        threads = [threading.Thread(target=vote), threading.Thread(target=record)]
        for thread in threads:
            thread.start()
        made.nodes[1].fabric.close(0, "test")
        made.nodes[1].events.poison(0, "test")
        for node in made.nodes:
            node.events.wait_poisoned()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        for work in works:
            assert work.ended_within(5)
            assert work.outcome is Outcome.DISCARDED
    assert waits == {"vote": (None, True), "record": False}


@BOTH
def test_a_work_that_was_poisoned_raises_outside_autograd_only(transport: TransportName) -> None:
    with mesh(2, transport=transport) as made:
        node = made.nodes[0]
        tensor = torch.ones(5)
        work = all_reduce(node, tensor)
        made.nodes[1].events.poison(0, "test")
        assert work.ended_within(5)
        with pytest.raises(StepDiscarded):
            work.wait()
        assert work.get_future().value() == [tensor]
        with pytest.raises(StepDiscarded):
            all_reduce(node, torch.ones(5))
        assert in_backward(lambda: work.wait()) is True
        assert in_backward(lambda: all_reduce(node, tensor).wait()) is True
        assert torch.isfinite(tensor).all()


def test_no_exception_handler_of_a_script_swallows_a_discard() -> None:
    assert not issubclass(StepDiscarded, Exception)


def in_backward(action: Any) -> Any:
    """What `action` returns when it is called inside a backward pass."""
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(action())
            return gradient

    Probe.apply(torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    return seen[0]


def test_after_the_vote_a_collective_is_refused_with_the_remedy_unless_it_is_log_only() -> None:
    with mesh(2) as made:
        for node in made.nodes:
            node.events.voted = True
        with pytest.raises(RuntimeError, match=r"Move it before optimizer.step\(\).*session.log_only"):
            all_reduce(made.nodes[0], torch.ones(3))

        def logged(node: Node) -> list[float]:
            tensor = torch.ones(3)
            with node.fabric.calls.log_only():
                all_reduce(node, tensor).wait()
            return tensor.tolist()

        assert together(made.nodes, logged) == [[2.0] * 3] * 2
        made.nodes[0].events.poison(0, "test")
        made.nodes[1].events.wait_poisoned()
        assert all(torch.tensor(logged(node)).isnan().all() for node in made.nodes)


@BOTH
def test_a_log_only_collective_that_breaks_on_the_way_yields_nan_and_raises_nothing(transport: TransportName) -> None:
    with mesh(2, transport=transport) as made:
        tensor = torch.ones(3)
        with made.nodes[0].fabric.calls.log_only():
            work = all_reduce(made.nodes[0], tensor)
        made.nodes[1].events.poison(0, "test")
        assert work.ended_within(5)
        assert work.wait()
        assert tensor.isnan().all()


@BOTH
def test_values_are_valid_when_a_gather_breaks_on_the_way(transport: TransportName) -> None:
    with mesh(2, transport=transport) as made:
        parts = [torch.full((4,), -1), torch.full((4,), -1)]
        work: Any = made.nodes[0].world.allgather([parts], [torch.full((4,), 9)])
        made.nodes[1].events.poison(0, "test")
        assert work.ended_within(5)
        assert [part.tolist() for part in parts] == [[9] * 4] * 2


def test_a_link_that_breaks_when_nothing_can_be_poisoned_any_more_fails_the_work() -> None:
    """After the last step the core ignores broken links: a collective of the script's end must say that its peer left."""
    with mesh(2) as made:
        made.nodes[0].events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        work = all_reduce(made.nodes[0], torch.ones(3))
        made.nodes[1].fabric.close_all()
        with pytest.raises(RuntimeError, match=r"allreduce on the tmd backend: rank 1 .* the job is ending"):
            work.wait()


def frame(made: Mesh, epoch: int, *, kind: Kind = Kind.DATA, sequence: int = 0, size: int = 20) -> tuple[Node, Link]:
    """Sends a forged frame from rank 1 to rank 0 on their link of the group; returns rank 0 and its end."""
    theirs = made.nodes[1].fabric._groups["world"].table
    mine = made.nodes[0].fabric._groups["world"].table
    assert theirs is not None
    assert mine is not None
    theirs.links[0].stream.write([HEADER.pack(MAGIC, kind, epoch, sequence, size) + b"\x7f" * size])
    return made.nodes[0], mine.links[1]


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_frame_of_another_epoch_is_refused_before_it_reaches_memory(epoch: int) -> None:
    with mesh(2, live=False) as made:
        made.go_live(made.table(1))
        node, _ = frame(made, epoch)
        tensor = torch.ones(5)
        work = node.world.broadcast([tensor], broadcast_from(1))
        with pytest.raises(StepDiscarded):
            work.wait()
        assert tensor.tolist() == [1.0] * 5
        assert node.events.broken[0][:3] == (1, 1, False)
        assert f"sent a frame of epoch {epoch} in epoch 1" in node.events.broken[0][3]


@pytest.mark.parametrize("forged", [{"sequence": 5}, {"size": 21}, {"kind": Kind.BALLOT}])
def test_a_frame_that_does_not_come_next_ends_the_process(forged: dict[str, Any]) -> None:
    with mesh(2) as made:
        node, _ = frame(made, 0, **forged)
        tensor = torch.ones(5)
        node.world.broadcast([tensor], broadcast_from(1))
        wait_until(lambda: bool(node.events.died))
        assert tensor.tolist() == [1.0] * 5
        node.events.died.clear()


def broadcast_from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def test_a_silent_peer_breaks_the_link_after_the_groups_timeout() -> None:
    with mesh(2, live=False) as made:
        for node in made.nodes:
            node.world._group.timeout_s = 0.2
        made.go_live(made.table(0))
        work = all_reduce(made.nodes[0], torch.ones(5))
        assert work.ended_within(5)
        assert "was silent for 0 s" in made.nodes[0].events.broken[0][3]


def test_a_large_send_to_a_peer_that_does_not_read_is_woken_too() -> None:
    with mesh(2) as made:
        work: Any = made.nodes[0].world.broadcast([torch.ones(8_000_000)], broadcast_from(0))
        assert not work.ended_within(0.1)
        made.nodes[0].events.poison(0, "test")
        assert work.ended_within(5)
        made.nodes[1].events.wait_poisoned()
        assert all(orderly for _, _, orderly, _ in made.nodes[1].events.broken)


def test_links_are_closed_even_after_the_watcher_has_ended() -> None:
    """A peer's last word may come while this process takes everything down."""
    with mesh(2) as made:
        watcher = made.nodes[1].fabric._watcher
        watcher.close()
        wait_until(lambda: watcher._epoll.closed)
        made.nodes[1].events.poison(0, "test")
        made.nodes[0].events.wait_poisoned()


def test_recovery_opens_new_links_and_the_old_ones_leave_no_descriptor() -> None:
    import os

    with mesh(3) as made:
        before = len(os.listdir("/proc/self/fd"))
        for epoch in range(1, 6):
            works = [all_reduce(node, torch.ones(50_000)) for node in made.nodes[:2]]
            made.nodes[2].events.poison(epoch - 1, "test")
            for node in made.nodes:
                node.events.wait_poisoned(epoch - 1)
            assert all(work.ended_within(5) for work in works)
            made.go_live(made.table(epoch))
            totals = together(made.nodes, lambda node: reduced(node))
            assert totals == [[3.0] * 4] * 3
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def reduced(node: Node) -> list[float]:
    tensor = torch.ones(4)
    all_reduce(node, tensor).wait()
    return tensor.tolist()


def test_a_link_opened_for_an_epoch_ahead_that_breaks_is_reported_for_that_epoch() -> None:
    with mesh(2) as made:
        for node in made.nodes:
            node.events.poison(0, "test")
        together(made.nodes, lambda node: node.fabric.open(made.table(1), node.rank, 5.0))
        made.nodes[1].fabric.close_all()
        made.nodes[0].events.wait_poisoned(1)
        assert all(epoch == 1 and peer == 1 for epoch, peer, _, _ in made.nodes[0].events.broken if epoch > 0)


def test_the_end_of_a_link_wakes_a_blocking_reader_that_is_interrupted() -> None:
    with mesh(2) as made:
        table = made.nodes[0].fabric._groups["world"].table
        assert table is not None
        link = table.links[1]

        def read(_: int) -> None:
            link.hold()
            try:
                with pytest.raises(LinkEnded):
                    link.receive_small(Kind.DATA, 0, 10)
            finally:
                link.release()

        def interrupt(_: int) -> None:
            wait_until(lambda: link.held > 0)
            made.nodes[0].events.poison(0, "test")

        together([0, 1], lambda number: (read, interrupt)[number](number))
        assert link.stream.sock.fileno() == -1


def test_a_process_forked_from_a_rank_does_not_keep_its_links_alive() -> None:
    """A data loader's worker outlives its rank: the peers must see the rank's death all the same."""

    def body(rank: Rank) -> Any:
        if rank.rank == 1:
            import os

            child = os.fork()
            if child == 0:
                time.sleep(5)
                os._exit(0)
            rank.tell(child)
            time.sleep(20)
        rank.events.wait_poisoned()
        return rank.events.broken

    with ranks(2, body) as processes:
        import os
        import signal

        child = processes[1].hear()
        try:
            processes[1].kill()
            assert processes[0].hear(4)[0][1] == 1
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_link_that_is_judged_while_its_epoch_is_closed_accuses_nobody() -> None:
    """1. A link ends. 2. Before a STOP is found on another link of that peer, this process closes them all."""
    with mesh(2) as made:
        node = made.nodes[0]
        table = node.fabric._groups["world"].table
        assert table is not None

        def too_late(peer: int) -> bool:
            node.events.poison(0, "test")
            return False

        node.fabric._said_stop = too_late  # type: ignore[method-assign]
        node.fabric.link_ended(table.links[1], "rank 1 hung up", orderly=False)
        assert node.events.broken == []


def test_admission_is_asked_with_what_the_thread_is_doing() -> None:
    with mesh(1) as made:
        asked = []

        def admit(*, in_autograd: bool, log_only: bool) -> Admission:
            asked.append((in_autograd, log_only))
            return Admission.PROCEED

        made.nodes[0].events.admit = admit  # type: ignore[method-assign]
        all_reduce(made.nodes[0], torch.ones(1))
        in_backward(lambda: all_reduce(made.nodes[0], torch.ones(1)))
        with made.nodes[0].fabric.calls.log_only():
            all_reduce(made.nodes[0], torch.ones(1))
        assert asked == [(False, False), (True, False), (False, True)]
        assert plan_of(made.table(1), made.table(0), 0).leavers == {0: "inc-0"}
