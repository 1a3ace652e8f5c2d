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
        rank.fabric.start_recording()
        answers = build(rank)
        recording = rank.fabric.stop_recording()
        build(rank)
        return answers, recording.to_bytes(), len(recording)

    def standby(rank: Rank) -> Any:
        rank.fabric.sandbox = True
        rank.fabric.rehearse(BuildRecording.from_bytes(recorded))
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
