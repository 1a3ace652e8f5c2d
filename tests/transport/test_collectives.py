"""Every collective yields exactly what it is for, on any number of ranks, for any size, dtype and layout."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.transport.mesh import Node, mesh, together
from tests.transport.ranks import Rank, ranks, run_ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd_worker.transport.rooted import TREE_BLOCK_BYTES
from tmd_worker.transport.topology import branches, next_hop

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
#: Up to the tree's limit, just above it, more than one frame, and odd numbers of elements.
SIZES = [0, 1, 5, 1000, 16_385, 70_001, 600_003]
REDUCTIONS = {
    "SUM": lambda stack: stack.sum(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "PRODUCT": lambda stack: stack.prod(0),
}


def values(seed: int, rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: sums and products of a few are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 3, (elements,), generator=generator).to(dtype)


def expected(name: str, stack: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return stack.any(0) if name in ("SUM", "MAX") else stack.all(0)
    wide = stack.to(torch.float64 if dtype.is_floating_point else torch.int64)
    reduced: torch.Tensor = REDUCTIONS[name](wide).to(dtype)
    return reduced


def cases(seed: int, number: int) -> list[tuple[str, int, torch.dtype]]:
    choose = random.Random(seed)
    return [(choose.choice(list(REDUCTIONS)), choose.choice(SIZES), choose.choice(DTYPES)) for _ in range(number)]


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_allreduce_of_any_size_and_dtype(size: int, transport: TransportName) -> None:
    def body(rank: Rank) -> list[str]:
        wrong = []
        for seed, (name, elements, dtype) in enumerate(cases(size, 16)):
            tensor = values(seed, rank.rank, elements, dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            stack = torch.stack([values(seed, other, elements, dtype) for other in range(size)])
            if not torch.equal(tensor, expected(name, stack, dtype)):
                wrong.append(f"{name} of {elements} {dtype}")
        return wrong

    assert run_ranks(size, body, transport=transport) == [[]] * size


@BOTH
def test_every_rank_ends_with_the_same_bits_and_so_does_a_second_run(transport: TransportName) -> None:
    def body(rank: Rank) -> list[bytes]:
        results = []
        for elements in (7, 5000, 200_003):
            tensor = torch.randn(elements, generator=torch.Generator().manual_seed(rank.rank))
            dist.all_reduce(tensor)
            results.append(tensor.numpy().tobytes())
            average = torch.randn(elements, generator=torch.Generator().manual_seed(rank.rank)).bfloat16()
            dist.all_reduce(average, dist.ReduceOp.AVG)
            results.append(average.view(torch.uint8).numpy().tobytes())
        return results

    first, second = run_ranks(4, body, transport=transport), run_ranks(4, body, transport=transport)
    assert all(one == first[0] for one in first)
    assert first == second


@BOTH
def test_average_is_the_sum_over_the_size(transport: TransportName) -> None:
    def body(rank: Rank) -> list[float]:
        small, large = torch.full((3,), float(4 * rank.rank)), torch.full((50_000,), float(4 * rank.rank))
        dist.all_reduce(small, dist.ReduceOp.AVG)
        dist.all_reduce(large, dist.ReduceOp.AVG)
        return [*small.tolist(), float(large.min()), float(large.max())]

    assert run_ranks(3, body, transport=transport) == [[4.0] * 5] * 3


@BOTH
def test_layouts_that_are_not_contiguous(transport: TransportName) -> None:
    def body(rank: Rank) -> list[bool]:
        base = torch.zeros(300, 400)
        transposed = base.t()
        transposed.fill_(rank.rank + 1)
        dist.all_reduce(transposed)
        columns = torch.zeros(200, 300)
        dist.broadcast(columns[:, 10:20].fill_(rank.rank), 1)
        mine = torch.arange(6).view(2, 3).t()
        parts = [torch.zeros(2, 3, dtype=torch.int64).t() for _ in range(3)]
        dist.all_gather(parts, mine + 10 * rank.rank)
        whole = torch.zeros(2, 9, dtype=torch.int64).t()
        dist.all_gather_single(whole, mine)
        scalar = torch.tensor(rank.rank)
        dist.all_reduce(scalar)
        return [
            bool((base == 6).all()),
            bool(columns[:, 10:20].eq(1).all()) and columns.sum().item() == 2000,
            all(torch.equal(part, mine + 10 * i) for i, part in enumerate(parts)),
            torch.equal(whole, mine.repeat(3, 1)),
            scalar.item() == 3,
        ]

    assert run_ranks(3, body, transport=transport) == [[True] * 5] * 3


def test_in_place_nothing_is_overwritten_before_it_is_sent() -> None:
    """With delta alone: of what gloo does then nothing is promised, it copies before in some forms and not in others."""

    def body(rank: Rank) -> list[Any]:
        listed = [torch.full((3,), 10 * rank.rank + place) for place in range(4)]
        dist.all_to_all(listed, listed)
        whole = 10 * rank.rank + torch.arange(4)
        dist.all_to_all_single(whole, whole)
        blocks = [torch.full((3,), place) for place in range(4)]
        output = blocks[2]
        dist.scatter(output, blocks if rank.rank == 0 else None, 0)
        return [[int(part[2]) for part in listed], whole.tolist(), int(output[0])]

    exchanged = [[10 * sender + rank for sender in range(4)] for rank in range(4)]
    assert run_ranks(4, body) == [[exchanged[rank], exchanged[rank], rank] for rank in range(4)]


@BOTH
@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_moves_values_without_changing_them(size: int, transport: TransportName) -> None:
    def body(rank: Rank) -> list[str]:
        wrong = []
        me = rank.rank
        for elements in (1, 3000, 700_001):
            sample = [values(7, other, elements, torch.int32) + other for other in range(size)]
            for root in range(size):
                tensor = sample[me].clone()
                dist.broadcast(tensor, root)
                if not torch.equal(tensor, sample[root]):
                    wrong.append(f"broadcast {elements} from {root}")
            parts = [torch.empty(elements, dtype=torch.int32) for _ in range(size)]
            dist.all_gather(parts, sample[me])
            whole = torch.empty(size * elements, dtype=torch.int32)
            dist.all_gather_single(whole, sample[me])
            gathered = [torch.empty(elements, dtype=torch.int32) for _ in range(size)] if me == 1 else None
            dist.gather(sample[me], gathered, dst=1)
            scattered = torch.empty(elements, dtype=torch.int32)
            dist.scatter(scattered, sample if me == 0 else None, src=0)
            if not all(torch.equal(a, b) for a, b in zip(parts, sample, strict=True)):
                wrong.append(f"all_gather {elements}")
            if not torch.equal(whole, torch.cat(sample)):
                wrong.append(f"all_gather_single {elements}")
            if gathered is not None and not all(torch.equal(a, b) for a, b in zip(gathered, sample, strict=True)):
                wrong.append(f"gather {elements}")
            if not torch.equal(scattered, sample[me]):
                wrong.append(f"scatter {elements}")
        return wrong

    assert run_ranks(size, body, transport=transport) == [[]] * size


@BOTH
def test_reduce_and_reduce_scatter(transport: TransportName) -> None:
    def body(rank: Rank) -> list[Any]:
        tensor = torch.full((40_000,), float(rank.rank))
        dist.reduce(tensor, 2)
        parts = [torch.full((30_000,), float(10 * rank.rank + part)) for part in range(3)]
        listed = torch.empty(30_000)
        dist.reduce_scatter(listed, parts)
        single = torch.empty(30_000)
        dist.reduce_scatter_single(single, torch.cat(parts))
        return [sorted(set(values.tolist())) for values in (tensor, listed, single, parts[0])]

    results = run_ranks(3, body, transport=transport)
    assert [result[0] for result in results] == [[0.0], [1.0], [3.0]]
    assert [result[1] for result in results] == [[30.0], [33.0], [36.0]]
    assert [result[2] for result in results] == [[30.0], [33.0], [36.0]]
    assert [result[3] for result in results] == [[0.0], [10.0], [20.0]]


@BOTH
def test_objects_and_functional_and_coalesced_forms(transport: TransportName) -> None:
    def body(rank: Rank) -> list[Any]:
        world: Any = dist.group.WORLD
        gathered: list[Any] = [None] * rank.size
        dist.all_gather_object(gathered, {"rank": rank.rank, "pad": "x" * rank.rank})
        listed = [f"from {rank.rank}", [rank.rank]]
        dist.broadcast_object_list(listed, 1)
        collected: list[Any] | None = [None] * rank.size if rank.rank == 0 else None
        dist.gather_object(rank.rank, collected, dst=0)
        given: list[Any] = [None]
        dist.scatter_object_list(given, ["a", "b", "c"] if rank.rank == 0 else None, src=0)
        one = functional.all_reduce(torch.ones(3), "sum", world) + 0
        both = functional.all_reduce_coalesced([torch.ones(2), torch.ones(70_000)], "sum", world)
        cat = functional.all_gather_single(torch.tensor([rank.rank]), 0, world) + 0
        with dist._coalescing_manager():  # type: ignore[attr-defined]
            first, second = torch.ones(2), torch.ones(3)
            dist.all_reduce(first)
            dist.all_reduce(second)
        dist.barrier()
        return [
            [entry["rank"] for entry in gathered],
            listed,
            collected,
            given,
            one.tolist(),
            [float(part.sum()) for part in both],
            cat.tolist(),
            first.tolist() + second.tolist(),
        ]

    results = run_ranks(3, body, transport=transport)
    for rank, result in enumerate(results):
        assert result[0] == [0, 1, 2]
        assert result[1] == ["from 1", [1]]
        assert result[2] == ([0, 1, 2] if rank == 0 else None)
        assert result[3] == [["a", "b", "c"][rank]]
        assert result[4] == [3.0] * 3
        assert result[5] == [6.0, 210_000.0]
        assert result[6] == [0, 1, 2]
        assert result[7] == [3.0] * 5


def test_a_subgroup_made_while_live_has_its_own_links() -> None:
    def body(rank: Rank) -> list[Any]:
        even = dist.new_group([0, 2])
        odd = dist.new_group([1, 3])
        mine = even if rank.rank % 2 == 0 else odd
        tensor = torch.tensor([rank.rank])
        dist.all_reduce(tensor, group=mine)
        alone = dist.new_group([rank.rank], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=alone)
        name = mine.group_name
        return [tensor.item(), dist.get_rank(mine), sorted(rank.fabric.links()[name])]

    assert run_ranks(4, body) == [[2, 0, [2]], [4, 0, [3]], [2, 1, [0]], [4, 1, [1]]]


@BOTH
def test_a_rank_that_destroys_its_groups_first_disturbs_nobody(transport: TransportName) -> None:
    """1. Rank 0 is done and destroys everything. 2. Only then rank 1 begins to wait. 3. Its collectives are complete."""

    def body(rank: Rank) -> Any:
        inner = dist.new_group([0, 1])
        tensors = [torch.ones(200_000), torch.ones(3)]
        works = [dist.all_reduce(tensors[0], async_op=True), dist.all_reduce(tensors[1], group=inner, async_op=True)]
        if rank.rank == 0:
            for work in works:
                work.wait()
            dist.destroy_process_group(inner)
            dist.destroy_process_group()
        rank.tell("done")
        rank.hear()
        if rank.rank == 1:
            for work in works:
                work.wait()
            dist.destroy_process_group()
        return [int(tensor.sum()) for tensor in tensors], rank.events.broken, dist.is_initialized()

    with ranks(2, body, transport=transport) as processes:
        assert [process.hear() for process in processes] == ["done", "done"]
        for process in processes:
            process.tell("go on")
        assert [process.hear() for process in processes] == [([400_000, 6], [], False)] * 2


def test_links_follow_the_algorithms_and_are_no_full_mesh() -> None:
    with mesh(8) as made:
        peers = {node.rank: sorted(node.fabric.links()["world"]) for node in made.nodes}
        votes = {node.rank: sorted(node.fabric.links()["tmd.session"]) for node in made.nodes}
    assert peers[0] == [1, 2, 7]
    assert peers[3] == [1, 2, 4, 7]
    assert votes == {0: [1, 2], 1: [0, 3, 4], 2: [0, 5, 6], 3: [1, 7], 4: [1], 5: [2], 6: [2], 7: [3]}


def test_the_links_of_a_rank_do_not_grow_with_the_number_of_members() -> None:
    """Counted at 64 members, real links in one process: a full mesh would be 63 for each group."""
    most, in_all = {}, {}
    for size in (8, 64):
        with mesh(size) as made:
            counts = [{name: len(peers) for name, peers in node.fabric.links().items()} for node in made.nodes]
        most[size] = {name: max(count[name] for count in counts) for name in ("world", "tmd.session", "tmd.buddy")}
        in_all[size] = sum(sum(count.values()) for count in counts) / 2
    assert most[8] == most[64] == {"world": 5, "tmd.session": 3, "tmd.buddy": 2}
    assert in_all[64] == 253  # 64 around the ring, 63 in the tree (one of which the ring has, too), 63 for the vote, 64 buddies


def test_small_gathers_scatters_and_reduces_need_no_links_of_their_own() -> None:
    with mesh(7) as made:
        before = {node.rank: node.fabric.links() for node in made.nodes}

        def body(node: Node) -> list[float]:
            own, room = torch.full((2,), float(node.rank)), torch.zeros(2)
            outputs = [torch.zeros(2) for _ in range(7)]
            node.world.gather([outputs] if node.rank == 5 else [], [own], rooted_at(dist.GatherOptions(), 5)).wait()
            node.world.scatter([room], [outputs] if node.rank == 5 else [], rooted_at(dist.ScatterOptions(), 5)).wait()
            node.world.reduce([own], rooted_at(dist.ReduceOptions(), 4)).wait()
            return [room[0].item(), own[0].item()]

        assert together(made.nodes, body) == [[float(rank), 21.0 if rank == 4 else float(rank)] for rank in range(7)]
        assert {node.rank: node.fabric.links() for node in made.nodes} == before


def rooted_at(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("root", [0, 1])
def test_of_a_gather_every_link_carries_one_message_towards_the_root(size: int, root: int) -> None:
    """Counted in frames: a member sends once, behind what came from each of its branches, and nothing comes back."""
    with mesh(size) as made:
        frames = together(made.nodes, lambda node: gathered(node, root, 3))
    for rank, (sent, received) in enumerate(frames):
        assert sent == (0 if rank == root else 1)
        assert received == len(branches(rank, size, None if rank == root else next_hop(rank, root)))


def test_large_blocks_go_straight_between_the_root_and_their_member() -> None:
    """Counted in frames: none on the links of ring and tree. There are new links between the root and the others alone."""
    size, root = 5, 3
    elements = TREE_BLOCK_BYTES // 4 + 1
    with mesh(size) as made:
        for _ in range(2):
            assert together(made.nodes, lambda node: gathered(node, root, elements)) == [(0, 0)] * size
        assert together(made.nodes, lambda node: scattered(node, root, elements)) == [(0, 0)] * size
        links = {node.rank: sorted(node.fabric.links()["world#direct"]) for node in made.nodes}
        others = [rank for rank in range(size) if rank != root]
        assert links == {rank: others if rank == root else [root] for rank in range(size)}
        sums = together(made.nodes, lambda node: reduced(node, root, size * elements))
        assert sums == [sum(range(size)) if rank == root else rank for rank in range(size)]
        assert {node.rank: sorted(node.fabric.links()["world#direct"]) for node in made.nodes} == links


def gathered(node: Node, root: int, elements: int) -> tuple[int, int]:
    """Frames that were sent and received on the links of ring and tree."""
    size, before = node.world.size(), frames_of(node)
    outputs = [torch.zeros(elements) for _ in range(size)] if node.rank == root else []
    own = torch.full((elements,), float(node.rank))
    node.world.gather([outputs] if outputs else [], [own], rooted_at(dist.GatherOptions(), root)).wait()
    assert [set(output.tolist()) for output in outputs] == [{rank} for rank in range(len(outputs))]
    return frames_of(node)[0] - before[0], frames_of(node)[1] - before[1]


def scattered(node: Node, root: int, elements: int) -> tuple[int, int]:
    before, room = frames_of(node), torch.zeros(elements)
    inputs = [[torch.full((elements,), float(rank)) for rank in range(node.world.size())]] if node.rank == root else []
    node.world.scatter([room], inputs, rooted_at(dist.ScatterOptions(), root)).wait()
    assert set(room.tolist()) == {node.rank}
    return frames_of(node)[0] - before[0], frames_of(node)[1] - before[1]


def reduced(node: Node, root: int, elements: int) -> float:
    own = torch.full((elements,), float(node.rank))
    node.world.reduce([own], rooted_at(dist.ReduceOptions(), root)).wait()
    (value,) = set(own.tolist())
    return float(value)


def frames_of(node: Node) -> tuple[int, int]:
    table = node.world._group.table
    assert table is not None
    return sum(link.state.sent for link in table.links.values()), sum(link.state.received for link in table.links.values())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda world: world.split_group([0]), "split_group"),
        (lambda world: world.allreduce([torch.ones(1)], options("BAND")), "BAND needs integers"),
        (lambda world: world.allreduce([torch.ones(1).to(torch.float8_e4m3fn)], options("SUM")), "float8_e4m3fn"),
        (lambda world: world.allreduce([torch.ones(1)], dist._make_nccl_premul_sum(2.0)), "PREMUL_SUM"),
        (lambda world: world.broadcast([torch.ones(1)], 1), "root 1"),
        (
            lambda world: world.allgather([[torch.ones(1), torch.ones(1)]], [torch.ones(1)]),
            "one tensor for each of the 1 members",
        ),
        (lambda world: world.all_gather_single(torch.ones(3), torch.ones(2)), "needs an output of 2, got 3"),
        (lambda world: world.reduce_scatter([torch.ones(3)], [[torch.ones(2)]]), "has 2 elements of torch.float32, its output 3"),
        (lambda world: world.alltoall([torch.ones(2)], [torch.ones(3)]), "does not fit"),
        (
            lambda world: world.all_to_all_single(torch.ones(3), torch.ones(3), [2], [3]),
            "output splits \\[2\\] do not cut 3 rows",
        ),
        (lambda world: world.recv([torch.ones(1)], 5, 0), "5 is no rank"),
        (lambda world: world.recv_anysource([torch.ones(1)], -2), "a tag must not be negative"),
        (lambda world: world.allreduce([torch.ones(1, dtype=torch.int32)], options("AVG")), "AVG needs floating point"),
        (lambda world: world.broadcast([torch.ones(2).to_sparse()], 0), "dense CPU tensors"),
        (lambda world: world.allreduce([nested()], options("SUM")), "dense CPU tensors, got a nested tensor"),
        (lambda world: world.allreduce([torch.ones(1).expand(4)], options("SUM")), r"shape \[4\], strides \[0\].*clone"),
        (lambda world: world.all_gather_single(torch.ones(2, 1).expand(2, 3), torch.ones(6)), "clone"),
        (lambda world: world.recv_anysource([torch.ones(1).expand(4)], 0), "clone"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(call: Any, name: str) -> None:
    with mesh(1) as made, pytest.raises((NotImplementedError, TypeError, ValueError), match=name):
        call(made.nodes[0].world)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def options(name: str) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = getattr(dist.ReduceOp, name)
    return made


def test_ranks_that_call_different_collectives_end_with_a_plain_message() -> None:
    with mesh(2) as made:
        together(made.nodes, lambda node: differing(node))
        errors = [str(error) for node in made.nodes for error in node.events.died]
        for node in made.nodes:
            node.events.died.clear()
    assert errors
    assert "the ranks call different collectives" in errors[0]


def differing(node: Node) -> None:
    node.world.allreduce([torch.ones(10 + node.rank)], options("SUM"))
    with node.events.changed:
        node.events.changed.wait_for(lambda: bool(node.events.died) or node.events.poisoned_epoch >= 0, 10)
    node.events.poison(0, "enough seen")
