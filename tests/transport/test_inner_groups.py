"""Inner groups (gloo here): made beside the live ones, only where a member changes, never waited for in vain."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Mesh, Node, mesh, plan_of, together, wait_until
from tests.transport.ranks import DEADLINE_S, Rank, ranks
from tests.transport.test_switchover import flip, reduced
from tmd.protocol.membership import Membership
from tmd_worker.discard import StepDiscarded
from tmd_worker.transport import gloo, preparing
from tmd_worker.transport.dialing import Cancelled, LinkError
from tmd_worker.transport.gloo import GlooGroup
from tmd_worker.transport.inner import InnerBroken
from tmd_worker.transport.rendezvous import MeetingBroken, Rendezvous
from tmd_worker.transport.shell import TmdProcessGroup
from tmd_worker.transport.work import Outcome, TmdWork

LEAVER = 2
#: Well below the deadlines of the library (30 s) and of the attempt (50 s), by which a death would also end it.
NOTICED_S = 20.0


def with_a_smaller_group(made: Mesh, ranks_of_it: tuple[int, ...]) -> dict[int, TmdProcessGroup]:
    def make(node: Node) -> tuple[int, TmdProcessGroup]:
        group = TmdProcessGroup(node.fabric, ranks_of_it.index(node.rank), ranks_of_it, 10.0)
        group._set_group_name("some")
        return node.rank, group

    return dict(together([node for node in made.nodes if node.rank in ranks_of_it], make))


def inner_of(group: TmdProcessGroup) -> Any:
    table = group._group.table
    assert table is not None
    return table.inner


def test_a_call_that_is_aborted_ends_though_gloo_does_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been seen to wait on with all connections closed; here they stay open. What gloo is still at is kept for good."""
    kept: list[Any] = []
    monkeypatch.setattr(gloo, "never_give_back", kept.append)
    with mesh(2, transport="gloo") as made:
        first, second = (inner_of(node.world) for node in made.nodes)
        ended: list[str] = []

        def call() -> None:
            try:
                first.barrier()
            except InnerBroken as error:
                ended.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        monkeypatch.setattr(gloo, "_shut", lambda sock: None)
        first.abort()
        wait_until(lambda: bool(ended))
        thread.join(DEADLINE_S)
        assert ended == ["gloo: the group was aborted in the middle of a call"]
        assert kept == [first._backend]
        second.barrier()  # lets what is left in gloo come to its end
        kept.clear()


def test_a_call_may_take_longer_than_one_look() -> None:
    with mesh(2, transport="gloo") as made:
        first, second = (inner_of(node.world) for node in made.nodes)
        begun = threading.Event()
        thread = threading.Thread(target=lambda: (begun.set(), first.barrier()))
        thread.start()
        begun.wait(DEADLINE_S)
        thread.join(1.5 * gloo._LOOK.total_seconds())
        assert thread.is_alive()
        second.barrier()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


# -------------------------------------------------------------------- planned


def test_only_groups_of_the_leaver_get_a_new_inner_group() -> None:
    with mesh(4, transport="gloo") as made:
        some = with_a_smaller_group(made, (0, 1))
        kept = {rank: inner_of(group) for rank, group in some.items()}
        before = [inner_of(node.world) for node in made.nodes]
        joiner = made.add("inc-j", LEAVER)
        stayers = [node for node in made.nodes[:4] if node.rank != LEAVER]
        plan = plan_of(made.table(1, r2=joiner), made.table(0), LEAVER)
        together([joiner, *stayers], lambda node: node.fabric.stage(plan, node.rank, 10.0))
        assert [inner_of(node.world) for node in made.nodes[:4]] == before  # nothing is used before the flip
        assert together(made.nodes[:4], reduced) == [[6.0] * 3] * 4
        flip(joiner, stayers, plan)
        assert {rank: inner_of(group) for rank, group in some.items()} == kept
        assert not {inner_of(node.world) for node in (joiner, *stayers)} & set(before)
        assert together([joiner, *stayers], reduced) == [[6.0] * 3] * 4
        assert all(node.events.broken == [] for node in (joiner, *stayers))


def test_moves_leave_no_descriptor_and_no_thread() -> None:
    with mesh(3, transport="gloo") as made:
        members = list(made.nodes)
        seen = []
        for epoch in range(1, 16):
            joiner = made.add(f"inc-{epoch}-j", LEAVER)
            stayers, leaver = members[:2], members[2]
            base = Membership(epoch=epoch - 1, members={node.rank: node.member for node in members})
            successor = Membership(epoch=epoch, members={node.rank: node.member for node in (*stayers, joiner)})
            plan = plan_of(successor, base, LEAVER, plan_id=epoch)
            together([joiner, *stayers], lambda node, plan=plan: node.fabric.stage(plan, node.rank, 10.0))  # type: ignore[misc]
            for node in stayers:
                node.fabric.switch(plan, epoch)
                node.events.run_epoch = epoch
            joiner.fabric.activate(epoch)
            joiner.events.run_epoch = epoch
            members = [*stayers, joiner]
            assert together(members, reduced) == [[3.0] * 3] * 3
            for node in stayers:
                node.fabric.retire(epoch)
            leaver.fabric.close_all()
            wait_until(lambda: not any(thread.name == "tmd-release" for thread in threading.enumerate()))
            seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        # one more or less may be just ending, 15 groups kept would be 30 threads more
        assert all(last <= first + 2 for first, last in zip(seen[0], seen[-1], strict=True)), seen


# -------------------------------------------------------------------- nobody waits in vain


def test_a_member_that_dies_while_the_group_is_made_ends_it_for_all() -> None:
    """Rank 2 says where it listens and is killed before anybody can connect."""

    def setup(rank: Rank) -> None:
        if rank.rank == 2:
            make = GlooGroup.make

            def dying(store: Rendezvous, host: str, place: int, size: int, timeout_s: float, making_s: float) -> GlooGroup:
                if rank.events.run_epoch:
                    store.set("device/2", b"\x92\xa9127.0.0.4\x01")
                    os.kill(os.getpid(), signal.SIGKILL)
                return make(store, host, place, size, timeout_s, making_s)

            preparing._MAKERS["gloo"] = dying

    def body(rank: Rank) -> str:
        rank.events.run_epoch = 1
        rank.events.poison(0, "test")
        try:
            rank.fabric.open(Membership(epoch=1, members=rank.table.members), rank.rank, 50.0)
        except LinkError as error:
            return str(error)
        return "made"

    with ranks(4, body, setup=setup, transport="gloo") as processes:
        said = [processes[rank].hear(NOTICED_S) for rank in (0, 1, 3)]
    # whoever sees it first says who left; the others that the hub hung up, or that a link broke
    assert all("was not made" in text or "rank 2" in text for text in said), said


def test_when_an_epoch_ends_all_inner_groups_that_are_in_use_are_aborted() -> None:
    """The first member waits in two of them; it can hear of the end from another member alone."""
    with mesh(3, transport="gloo") as made:
        smaller = with_a_smaller_group(made, (0, 1))[0]
        waiting = [group.allreduce([torch.ones(5)], dist.AllreduceOptions()) for group in (made.nodes[0].world, smaller)]
        made.nodes[1].events.poison(0, "test")
        made.nodes[0].events.wait_poisoned()
        for work in waiting:
            assert isinstance(work, TmdWork)
            assert work.ended_within(NOTICED_S)
            assert work.outcome is Outcome.DISCARDED


def test_a_plan_that_is_dropped_while_its_group_is_made_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make, waits, go_on = preparing._MAKERS["gloo"], threading.Event(), threading.Event()

    def stuck(store: Rendezvous, host: str, rank: int, size: int, timeout_s: float, making_s: float) -> GlooGroup:
        waits.set()
        assert go_on.wait(30)
        raise RuntimeError("nobody came")

    with mesh(2, transport="gloo") as made:
        joiner = made.add("inc-j", 1)
        plan = plan_of(made.table(1, r1=joiner), made.table(0), 1)
        monkeypatch.setitem(preparing._MAKERS, "gloo", stuck)

        def act(what: str) -> None:
            if what == "drop":
                assert waits.wait(10)
                made.nodes[0].fabric.drop_staged(plan.plan_id)
                return
            node = made.nodes[0] if what == "stayer" else joiner
            # whoever is not told finds out by the other one, who has hung up
            with pytest.raises(Cancelled if what == "stayer" else LinkError):
                node.fabric.stage(plan, node.rank, 30.0)

        together(["stayer", "joiner", "drop"], act)
        go_on.set()
        monkeypatch.setitem(preparing._MAKERS, "gloo", make)
        assert together(made.nodes[:2], reduced) == [[1.0] * 3] * 2
        wait_until(lambda: not any(thread.name.startswith("tmd-make") for thread in threading.enumerate()))


def test_a_member_that_never_comes_ends_the_attempt_at_its_deadline() -> None:
    with mesh(2, transport="gloo") as made:
        joiner = made.add("inc-j", 1)
        plan = plan_of(made.table(1, r1=joiner), made.table(0), 1)
        with pytest.raises(LinkError, match=r"rank 1 .*did not open its link of group .* in time"):
            made.nodes[0].fabric.stage(plan, 0, 0.5)
        assert together(made.nodes[:2], reduced) == [[1.0] * 3] * 2


def test_a_rank_killed_in_a_collective_ends_it_for_all() -> None:
    def body(rank: Rank) -> tuple[str, list[Any]]:
        rank.tell("ready")
        try:
            while True:
                dist.all_reduce(torch.ones(300_000))
        except StepDiscarded as discarded:
            return type(discarded).__name__, rank.events.broken

    with ranks(4, body, transport="gloo") as processes:
        for process in processes:
            assert process.hear() == "ready"
        processes[2].kill()
        results = [processes[rank].hear() for rank in (0, 1, 3)]
    assert [name for name, _ in results] == ["StepDiscarded"] * 3
    broken = [entry for _, entries in results for entry in entries]
    assert {peer for _, peer, orderly, _ in broken if not orderly} <= {2}, broken


# -------------------------------------------------------------------- the script for real devices, here with gloo


def test_the_script_for_gpus_replaces_a_member_on_the_cpu() -> None:
    command = [sys.executable, "-m", "bench.gpu.inner_groups", "--transport", "gloo", "--members", "2", "--moves", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert (figures["transport"], figures["members"], figures["moves"]) == ("gloo", 2, 1)
    assert min(figures["make_ms"], figures["switch_ms"], figures["kill_to_end_ms"]) > 0


def test_the_script_for_gpus_says_how_many_it_needs() -> None:
    command = [sys.executable, "-m", "bench.gpu.inner_groups", "--transport", "nccl", "--members", "500"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert "500 members and a joiner need 501 GPUs, this machine has" in " ".join(ended.stderr.split())


# -------------------------------------------------------------------- the rendezvous


def meeting(members: int) -> list[Rendezvous]:
    def spawn(name: str, body: Any) -> None:
        threading.Thread(target=body, name=f"test-{name}", daemon=True).start()

    pairs = [socket.socketpair() for _ in range(members - 1)]
    hub = Rendezvous({place: pair[0] for place, pair in enumerate(pairs, 1)}, hub=True, spawn=spawn)
    return [hub, *(Rendezvous({0: pair[1]}, hub=False, spawn=spawn) for pair in pairs)]


def test_what_one_sets_all_can_get() -> None:
    stores = meeting(4)

    def meet(place: int) -> list[bytes]:
        stores[place].set(f"at/{place}", f"value {place}")
        return [stores[place].get(f"at/{other}") for other in range(4)]

    assert together(list(range(4)), meet) == [[f"value {place}".encode() for place in range(4)]] * 4
    stores[0].close(done=True)
    stores[1].close(done=True)
    assert stores[2].broken is None  # they had everything
    stores[2].close(done=True)
    stores[3].close(done=True)


def test_who_leaves_before_it_is_done_ends_it_for_all() -> None:
    stores = meeting(4)
    waiting = [pytest.raises(MeetingBroken) for _ in range(3)]

    def act(place: int) -> None:
        if place == 3:
            stores[3].close(done=False)
            return
        with waiting[place]:
            stores[place].get("what nobody sets")

    together(list(range(4)), act)
    assert stores[0].broken == "rank 3 left before the group was made"
    for store in stores[:3]:
        store.close(done=False)


def test_what_is_no_message_ends_it() -> None:
    ours, theirs = socket.socketpair()
    store = Rendezvous({1: ours}, hub=True, spawn=lambda _, body: threading.Thread(target=body, daemon=True).start())
    theirs.sendall(b"\x00\x00\x00\x05hello")
    with pytest.raises(MeetingBroken, match="rank 1: message rendezvous of a group refused"):
        store.get("anything")
    store.close(done=False)
    theirs.close()


def test_a_wait_has_an_end() -> None:
    stores = meeting(2)
    stores[1].set_timeout(datetime.timedelta(milliseconds=50))
    with pytest.raises(MeetingBroken, match=r"no member has set that within 0\.05 s"):
        stores[1].get("that")
    for store in stores:
        store.close(done=False)
