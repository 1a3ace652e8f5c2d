"""A collective whose caller waits for it runs in the caller's thread, if nothing is before it: same order, same ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.ranks import DEADLINE_S, Rank, ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd_worker.discard import StepDiscarded


def group_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tmd-group-")]


def begun(rank: Rank) -> bool:
    """An operation of the default group is being run."""
    return rank.fabric._groups["0"]._executing.locked()


def wait_until_begun(rank: Rank) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not begun(rank):
        assert time.monotonic() < deadline_s, "never begun"
        time.sleep(0.001)


def all_kinds(rank: Rank) -> list[torch.Tensor]:
    """One call of every kind; what each yields."""
    size, own = rank.size, torch.arange(6.0) + rank.rank
    summed, sent = own.clone(), own.clone()
    dist.all_reduce(summed)
    dist.broadcast(sent, src=1)
    dist.barrier()
    blocks = [torch.empty(6) for _ in range(size)]
    dist.all_gather(blocks, own)
    whole = torch.empty(6 * size)
    dist.all_gather_single(whole, own)
    part = torch.empty(6)
    dist.reduce_scatter(part, [own * place for place in range(size)])
    piece = torch.empty(6)
    dist.reduce_scatter_single(piece, own.repeat(size))
    reduced = own.clone()
    dist.reduce(reduced, dst=0)
    gathered = [torch.empty(6) for _ in range(size)] if rank.rank == 0 else None
    dist.gather(own, gathered, dst=0)
    scattered = torch.empty(6)
    dist.scatter(scattered, [own * place for place in range(size)] if rank.rank == 0 else None, src=0)
    exchanged = torch.empty(6)
    dist.all_to_all_single(exchanged, own)
    swapped = [torch.empty(6 // size) for _ in range(size)]
    dist.all_to_all(swapped, list(own.chunk(size)))
    at_root = [reduced, *(gathered or [])] if rank.rank == 0 else []
    return [summed, sent, *blocks, whole, part, piece, *at_root, scattered, exchanged, *swapped]


def test_no_thread_is_needed_and_the_values_are_those_of_gloo() -> None:
    def body(rank: Rank) -> Any:
        ours = all_kinds(rank)
        before = group_threads()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        return [tensor.tolist() for tensor in ours], before, group_threads()

    def reference(rank: Rank) -> Any:
        dist.init_process_group("gloo", store=dist.FileStore(rank._store_path, rank.size), rank=rank.rank, world_size=rank.size)  # type: ignore[attr-defined]
        return [tensor.tolist() for tensor in all_kinds(rank)]

    with ranks(2, body) as processes:
        ours = [process.hear() for process in processes]
    with ranks(2, reference, live=False) as processes:
        expected = [process.hear() for process in processes]
    assert [values for values, _, _ in ours] == expected
    for _, before, after in ours:
        assert before == []
        assert len(after) == 1


@BOTH
def test_it_comes_after_what_is_under_way(transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        total = torch.full((2_000_000,), float(rank.rank + 1))
        works = [dist.all_reduce(total, async_op=True) for _ in range(4)]
        dist.all_reduce(total)
        assert all(work.is_completed() for work in works)
        return total[0].item(), total[-1].item()

    with ranks(3, body, transport=transport) as processes:
        # (1 + 2 + 3) by 3 for each of four more
        assert [process.hear() for process in processes] == [(6.0 * 3**4, 6.0 * 3**4)] * 3


@BOTH
def test_whoever_calls_meanwhile_is_not_held_up_and_comes_after_it(transport: TransportName) -> None:
    """1. Rank 0 waits in a call for rank 1. 2. Another thread of rank 0 makes a call and goes on. 3. Only then rank 1 comes."""

    def body(rank: Rank) -> Any:
        first, second = torch.ones(3), torch.full((3,), 10.0)
        if rank.rank:
            assert rank.hear() == "come"
            dist.all_reduce(first)
            dist.all_reduce(second)
            return first.tolist(), second.tolist()

        def call_meanwhile() -> None:
            wait_until_begun(rank)
            works.append(dist.all_reduce(second, async_op=True))
            rank.tell(works[0].is_completed())

        works: list[Any] = []
        other = threading.Thread(target=call_meanwhile)
        other.start()
        dist.all_reduce(first)
        other.join()
        works[0].wait()
        return first.tolist(), second.tolist()

    with ranks(2, body, transport=transport) as processes:
        assert processes[0].hear() is False
        processes[1].tell("come")
        assert [process.hear() for process in processes] == [([2.0] * 3, [20.0] * 3)] * 2


@BOTH
def test_poison_wakes_the_caller(transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        if rank.rank:
            return rank.hear()
        poisoning = threading.Thread(target=lambda: (wait_until_begun(rank), rank.events.poison(0, "test")))
        poisoning.start()
        with pytest.raises(StepDiscarded):
            dist.all_reduce(torch.ones(3))
        poisoning.join()
        return not begun(rank)

    with ranks(2, body, transport=transport) as processes:
        assert processes[0].hear() is True
        processes[1].tell("end")


@BOTH
def test_a_signal_whose_handler_raises_ends_the_epoch_since_nobody_knows_how_far_the_call_came(transport: TransportName) -> None:
    """1. Rank 0 waits in a call. 2. It gets SIGINT. 3. Rank 1 comes, so the call ends. 4. The handler runs, and raises."""

    def body(rank: Rank) -> Any:
        if rank.rank:
            assert rank.hear() == "come"
            with contextlib.suppress(StepDiscarded):  # it may have been complete here before the handler ran there
                dist.all_reduce(torch.ones(3))
            rank.events.wait_poisoned()
            with pytest.raises(StepDiscarded):
                dist.all_reduce(torch.ones(3))
            return None

        def interrupt() -> None:
            wait_until_begun(rank)
            os.kill(os.getpid(), signal.SIGINT)
            rank.tell("interrupted")

        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        interrupting.join()
        with pytest.raises(StepDiscarded):
            dist.all_reduce(torch.ones(3))
        return rank.events.broken

    with ranks(2, body, transport=transport) as processes:
        assert processes[0].hear() == "interrupted"
        processes[1].tell("come")
        assert processes[0].hear() == [(0, 0, True, "allreduce was interrupted on this rank")]
        processes[1].hear()


def test_a_handler_that_raises_while_a_call_is_being_ended_hides_behind_no_other_error_and_the_call_has_ended() -> None:
    """As before, in the one moment in which the result is there for some and not for others."""

    def body(rank: Rank) -> Any:
        if rank.rank:
            with contextlib.suppress(StepDiscarded):
                dist.all_reduce(torch.ones(3))
            rank.events.wait_poisoned()
            return None

        def interrupt(frame: FrameType, _event: str, _argument: object) -> None:
            if frame.f_code is threading.Event.set.__code__:  # in work.end, behind the future's result
                sys.settrace(None)
                raise KeyboardInterrupt

        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        last = rank.fabric._groups["0"].last
        assert last is not None
        return last.is_completed(), rank.events.broken

    with ranks(2, body) as processes:
        assert processes[0].hear() == (True, [(0, 0, True, "allreduce was interrupted on this rank")])
        processes[1].hear()


class Impatient(Exception):
    pass


def test_an_exception_of_a_handler_is_the_scripts_and_its_own_collective_is_refused() -> None:
    """As before, with a handler that raises what is no KeyboardInterrupt, after it has tried a collective of the same group."""

    def body(rank: Rank) -> Any:
        if rank.rank:
            assert rank.hear() == "come"
            with contextlib.suppress(StepDiscarded):
                dist.all_reduce(torch.ones(3))
            rank.events.wait_poisoned()
            return None
        refused = []

        def handle(*_: object) -> None:
            try:
                dist.all_reduce(torch.ones(3))
            except RuntimeError as error:
                refused.append(str(error))
            raise Impatient

        def interrupt() -> None:
            wait_until_begun(rank)
            os.kill(os.getpid(), signal.SIGUSR1)
            rank.tell("interrupted")

        signal.signal(signal.SIGUSR1, handle)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(Impatient):
            dist.all_reduce(torch.ones(3))
        interrupting.join()
        return refused, rank.events.died, rank.events.broken

    with ranks(2, body) as processes:
        assert processes[0].hear() == "interrupted"
        processes[1].tell("come")
        refused, died, broken = processes[0].hear()
        assert refused == ["allreduce was called in a signal's handler, in the middle of another of its group"]
        assert died == []
        assert broken == [(0, 0, True, "allreduce was interrupted on this rank")]
        processes[1].hear()
