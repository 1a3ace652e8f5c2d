"""In sandbox every collective is local: with the answers that a live rank recorded, or with values made from the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.ranks import Rank, run_ranks
from tmd_worker.transport.recording import MAX_ANSWER_BYTES, MAX_TOTAL_BYTES, BuildRecording


def build(rank: Rank) -> list[Any]:
    """What a script's build does: objects from everybody and from rank 0, sizes, a seed, parameters."""
    gathered: list[Any] = [None] * rank.size
    dist.all_gather_object(gathered, f"host of {rank.rank}" + "!" * rank.rank)
    config: list[Any] = [{"width": 32}, "x"] if rank.rank == 0 else [None, None]
    dist.broadcast_object_list(config, 0)
    collected: list[Any] | None = [None] * rank.size if rank.rank == rank.size - 1 else None
    dist.gather_object(("rank", rank.rank), collected, dst=rank.size - 1)
    longest = torch.tensor(10 + rank.rank)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    seed = torch.tensor([rank.rank + 77])
    dist.broadcast(seed, 1)
    return [gathered, config, collected, longest.item(), seed.item()]


def test_a_standby_builds_with_the_values_of_the_live_ranks() -> None:
    def live(rank: Rank) -> Any:
        rank.fabric.calls.start_recording()
        answers = build(rank)
        recording = rank.fabric.calls.stop_recording()
        build(rank)
        return answers, recording.to_bytes(), len(recording)

    def standby(rank: Rank) -> Any:
        rank.fabric.sandbox = True
        rank.fabric.calls.rehearsal = BuildRecording.from_bytes(recorded)
        return build(rank)

    results = run_ranks(3, live)
    answers, recorded, number = results[2]
    assert number == 8
    representative = run_ranks(3, lambda rank: standby(rank) if rank.rank == 2 else None)[2]
    assert representative == answers
    assert answers == [
        ["host of 0", "host of 1!", "host of 2!!"],
        [{"width": 32}, "x"],
        [("rank", 0), ("rank", 1), ("rank", 2)],
        12,
        78,
    ]


def test_without_a_recording_everybody_seems_to_have_passed_what_this_one_passed() -> None:
    def body(rank: Rank) -> Any:
        rank.fabric.sandbox = True
        built = build(rank)
        given: list[Any] = ["untouched"]
        dist.scatter_object_list(given, ["a", "b", "c"] if rank.rank == 0 else None, src=0)
        total = torch.full((3,), 2.0)
        dist.all_reduce(total)
        average = torch.full((3,), 2.0)
        dist.all_reduce(average, dist.ReduceOp.AVG)
        parts = [torch.empty(2, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([5, 6]))
        whole = torch.empty(6)
        dist.all_gather_single(whole, torch.tensor([1.0, 2.0]))
        shard = torch.empty(2)
        dist.reduce_scatter_single(shard, torch.arange(6.0))
        received = torch.empty(2)
        dist.recv(received, (rank.rank + 1) % 3)
        dist.send(received, (rank.rank + 1) % 3)
        dist.barrier()
        return [
            *built,
            given,
            total.tolist(),
            average.tolist(),
            [part.tolist() for part in parts],
            whole.tolist(),
            shard.tolist(),
            bool(received.isfinite().all()),
        ]

    for rank, result in enumerate(run_ranks(3, body)):
        assert result == [
            [f"host of {rank}" + "!" * rank] * 3,
            [{"width": 32}, "x"] if rank == 0 else [None, None],
            [("rank", 2)] * 3 if rank == 2 else None,
            10 + rank,
            77 + rank,
            ["a"] if rank == 0 else [None],
            [6.0] * 3,
            [2.0] * 3,
            [[5, 6]] * 3,
            [1.0, 2.0] * 3,
            [6.0 * rank, 6.0 * rank + 3.0],
            True,
        ]


def exchanges(rank: Rank) -> list[Any]:
    """Parts for each and from each, objects from one to the next, a message from anybody."""
    me, size = rank.rank, rank.size
    parts = [torch.tensor([10 * me + other]) for other in range(size)]
    listed = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(listed, parts)
    single = torch.empty(size)
    dist.all_to_all_single(single, torch.arange(float(size)) + 100 * me)
    shard = torch.empty(1)
    dist.reduce_scatter(shard, [torch.tensor([float(other)]) for other in range(size)])
    part = torch.empty(1)
    dist.scatter(part, [torch.tensor([7.0 + other]) for other in range(size)] if me == 0 else None, src=0)
    objects: list[Any] = [None, None]
    if me == 0:
        for other in range(1, size):
            dist.send_object_list([{"for": other}, "x" * other], other)
    else:
        dist.recv_object_list(objects, 0)
    message = torch.empty(2, dtype=torch.int64)
    if me == size - 1:
        for _ in range(size - 1):
            sender = dist.recv(message, tag=1)
            assert 0 <= sender < size
            assert sender != me
    else:
        dist.send(torch.full((2,), 50), size - 1, tag=1)
    values = [[t.item() for t in listed], single.tolist(), shard.tolist(), part.tolist()]
    return [*values, objects, message.tolist() if me == size - 1 else None]


def test_a_standby_exchanges_what_the_live_ranks_exchanged() -> None:
    def live(rank: Rank) -> Any:
        rank.fabric.calls.start_recording()
        answers = exchanges(rank)
        return answers, rank.fabric.calls.stop_recording().to_bytes()

    def standby(rank: Rank) -> Any:
        rank.fabric.sandbox = True
        rank.fabric.calls.rehearsal = BuildRecording.from_bytes(recorded)
        return exchanges(rank)

    answers, recorded = run_ranks(3, live)[2]
    assert answers == [
        [2, 12, 22],
        [2.0, 102.0, 202.0],
        [6.0],
        [9.0],
        [{"for": 2}, "xx"],
        [50, 50],
    ]
    assert run_ranks(3, lambda rank: standby(rank) if rank.rank == 2 else None)[2] == answers


def test_without_a_recording_what_is_exchanged_is_made_of_what_this_one_passed() -> None:
    def body(rank: Rank) -> Any:
        rank.fabric.sandbox = True
        made = exchanges(rank)
        rows = torch.full((2,), -1)
        for_others = [1 if other != rank.rank else 0 for other in range(3)]
        dist.all_to_all_single(rows, torch.tensor([4, 5]), for_others, for_others)
        nothing = torch.full((2,), -1)
        dist.all_to_all_single(nothing, torch.empty(0, dtype=torch.int64), [0, 2, 0] if rank.rank != 1 else [2, 0, 0], [0] * 3)
        bits = torch.tensor([6, 7])
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            dist.all_reduce(bits, op)
        with dist._coalescing_manager(device=torch.device("cpu")):  # type: ignore[attr-defined]
            dist.broadcast(bits, 0)
        return [made, rows.tolist(), nothing.tolist(), bits.tolist()]

    for me, (made, rows, nothing, bits) in enumerate(run_ranks(3, body)):
        assert made[:3] == [[11 * me] * 3, [101.0 * me] * 3, [3.0 * me]]
        assert made[3] == ([7.0] if me == 0 else [1.0])
        assert made[4] == [None, None]
        assert made[5] == ([1, 1] if me == 2 else None)
        assert set(rows) <= {4, 5}
        assert nothing == [1, 1]
        assert bits == [6, 7]


def test_the_sandbox_reaches_nobody() -> None:
    def body(rank: Rank) -> Any:
        if rank.rank == 1:
            rank.fabric.sandbox = True
            for _ in range(3):
                dist.all_reduce(torch.ones(100_000))
            rank.fabric.sandbox = False
        total = torch.ones(4)
        dist.all_reduce(total)
        return total.tolist()

    assert run_ranks(2, body) == [[2.0] * 4] * 2


def test_a_recording_survives_its_bytes_and_only_fitting_answers_are_used() -> None:
    recording = BuildRecording()
    recording.add("0", 4, "broadcast", [torch.arange(6).view(2, 3).t()])
    copy = BuildRecording.from_bytes(recording.to_bytes())
    target = torch.zeros(3, 2, dtype=torch.int64)
    assert not copy.replay("1", 4, "broadcast", [target])
    assert not copy.replay("0", 3, "broadcast", [target])
    assert not copy.replay("0", 4, "allreduce", [target])
    assert not copy.replay("0", 4, "broadcast", [target, target])
    assert not copy.replay("0", 4, "broadcast", [target.to(torch.int32)])
    assert not target.any()
    assert copy.replay("0", 4, "broadcast", [target])
    assert torch.equal(target, torch.arange(6).view(2, 3).t())


def test_a_recording_is_bounded() -> None:
    recording = BuildRecording()
    recording.add("0", 0, "broadcast", [torch.zeros(MAX_ANSWER_BYTES + 1, dtype=torch.uint8)])
    recording.add("0", 1, "barrier", [])
    assert len(recording) == 0
    for index in range(MAX_TOTAL_BYTES // MAX_ANSWER_BYTES + 5):
        recording.add("0", index, "broadcast", [torch.zeros(MAX_ANSWER_BYTES, dtype=torch.uint8)])
    assert len(recording) == MAX_TOTAL_BYTES // MAX_ANSWER_BYTES
    assert len(BuildRecording.from_bytes(recording.to_bytes())) == len(recording)


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", b"\x82\xa7version\x09\xa6groups\x80", bytes(3 * MAX_TOTAL_BYTES)])
def test_bytes_that_are_no_recording_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="recording"):
        BuildRecording.from_bytes(data)
