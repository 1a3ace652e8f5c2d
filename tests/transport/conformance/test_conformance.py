"""One set of processes for each number of ranks runs all cases, on tmd and on gloo; what they yield must be the same bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.transport.conformance import summation
from tests.transport.conformance.cases import Case, laid_out, plain, random_case, same_bits
from tests.transport.conformance.operations import OPERATIONS, Run
from tests.transport.ranks import ALL_WAYS, Rank, run_ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName

pytestmark = pytest.mark.filterwarnings("ignore:.*_coalesced. will be deprecated:FutureWarning")
#: Members -> cases of each operation, and the largest message: gloo takes its time when there are more ranks than cores.
ROUNDS = {1: 3, 2: 8, 3: 6, 4: 4, 5: 2, 6: 2, 7: 1, 8: 2}
LARGEST_BYTES = {1: 3_000_000, 2: 3_000_000, 3: 3_000_000, 4: 1 << 20, 5: 1 << 20, 6: 70_000, 7: 70_000, 8: 1 << 20}


def differences(case: Case, group: Any, twin: Any) -> list[str]:
    """What this member got of another value than on gloo."""
    on_tmd, on_gloo = OPERATIONS[case.operation]
    try:
        got = on_tmd(Run(case, group, gloo=False))
        refusal = None
    except Exception as error:
        got, refusal = [], error
    expected = on_gloo(Run(case, twin, gloo=True))
    if refusal is not None:
        return [f"{case}: {refusal!r}"]
    wrong = [number for number, (one, other) in enumerate(zip(got, expected, strict=True)) if not same_bits(one, other)]
    return [f"{case}: outputs {wrong}"] if wrong else []


@ALL_WAYS
@pytest.mark.parametrize("size", list(ROUNDS))
def test_every_operation_yields_what_it_yields_on_gloo(size: int, transport: TransportName, links: str) -> None:
    def body(rank: Rank) -> list[str]:
        twin = dist.new_group(backend="gloo")
        wrong = []
        for repetition in range(ROUNDS[size]):
            for number, name in enumerate(OPERATIONS):
                seed = 1_000_000 * size + 1000 * repetition + number
                case = random_case(seed, name, size, largest_bytes=LARGEST_BYTES[size])
                wrong += differences(case, dist.group.WORLD, twin)
        return wrong

    assert run_ranks(size, body, transport=transport, links=links) == [[]] * size


@ALL_WAYS
def test_sub_groups_late_and_nested_ones_and_what_is_left_when_one_is_destroyed(transport: TransportName, links: str) -> None:
    """Groups of some of the ranks, made between collectives; groups within groups; collectives of several at the same time."""

    def body(rank: Rank) -> list[str]:
        wrong: list[str] = []
        for repetition, members in enumerate(([0, 1, 2, 3, 4], [1, 3, 4], [4, 3], [0, 2], [2])):
            group, twin = dist.new_group(members), dist.new_group(members, backend="gloo")
            if rank.rank in members:
                for number, name in enumerate(OPERATIONS):
                    seed = 77_000 + 100 * repetition + number
                    wrong += differences(random_case(seed, name, len(members), largest_bytes=70_000), group, twin)
            total = torch.ones(3)
            dist.all_reduce(total)
            if total.tolist() != [5.0] * 3:
                wrong.append(f"the world after the group {members}")
            if rank.rank in members and repetition % 2:
                dist.destroy_process_group(group)
        return wrong

    assert run_ranks(5, body, transport=transport, links=links) == [[]] * 5


EVERY_RANKS_ALONE = ["all_reduce", "broadcast", "send_and_receive_around", "all_to_all_single", "reduce"]
LARGE = {
    2: list(OPERATIONS),
    3: ["all_reduce", "all_gather_single"],
    8: ["all_reduce", "all_gather_single", "reduce_scatter_single"],
}


@pytest.mark.parametrize("links", ["tcp", "shm"])
@pytest.mark.parametrize("size", list(LARGE))
def test_messages_of_64_mib(size: int, links: str) -> None:
    """What a rank ends with, or brings: of an operation that has a part for each rank the parts together."""

    def body(rank: Rank) -> list[str]:
        twin = dist.new_group(backend="gloo")
        wrong = []
        for number, name in enumerate(LARGE[size]):
            elements = (64 << 20) // 4 // (1 if name in EVERY_RANKS_ALONE else size)
            wrong += differences(Case(number, name, elements, torch.float32, "SUM", size - 1, "plain"), dist.group.WORLD, twin)
        return wrong

    assert run_ranks(size, body, links=links) == [[]] * size


#: Members -> operations drawn; beyond four ranks gloo takes its time.
LARGE_DRAWS = {1: 6, 2: 8, 3: 5, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2}


@pytest.mark.parametrize("links", ["tcp", "unix", "shm"])
@pytest.mark.parametrize("size", list(LARGE_DRAWS))
def test_large_messages_of_any_type_and_layout(size: int, links: str) -> None:
    """Up to 64 MiB in all that a rank ends with, or brings. The draws differ from link to link."""

    def body(rank: Rank) -> list[str]:
        twin = dist.new_group(backend="gloo")
        choose = random.Random(f"{size} ranks by {links}")
        wrong = []
        for name in choose.sample(list(OPERATIONS), LARGE_DRAWS[size]):
            share = 1 if name in EVERY_RANKS_ALONE else size
            case = random_case(
                choose.randrange(1 << 30), name, size, smallest_bytes=(3 << 20) // share, largest_bytes=(64 << 20) // share
            )
            wrong += differences(case, dist.group.WORLD, twin)
        return wrong

    assert run_ranks(size, body, links=links) == [[]] * size


@pytest.mark.parametrize("links", ["tcp", "shm"])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_float_sums_have_the_bits_of_the_documented_order(size: int, links: str) -> None:
    """The largest goes around the ring in segments of several frames."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for dtype in (
            (torch.float32, torch.bfloat16) if size > 3 else (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        ):
            at_the_limit = summation.TREE_BYTES // dtype.itemsize
            several_frames = 300_007 * size if dtype is torch.float32 else 100_003
            for elements in (1, 1000, at_the_limit, at_the_limit + 1, several_frames):
                parts = [drawn(member, elements, dtype) for member in range(size)]
                expected = summation.all_reduced(parts)
                everywhere, at_one = parts[rank.rank].clone(), laid_out(parts[rank.rank], "strided")
                dist.all_reduce(everywhere)
                dist.reduce(at_one, size - 1)
                if not same_bits(everywhere, expected):
                    wrong.append(f"all_reduce of {elements} {dtype}")
                if rank.rank == size - 1 and not same_bits(at_one, expected):
                    wrong.append(f"reduce of {elements} {dtype}")
                wrong += scattered_sum(rank.rank, parts)
        return wrong

    assert run_ranks(size, body, links=links) == [[]] * size


def scattered_sum(rank: int, parts: list[Tensor]) -> list[str]:
    size = len(parts)
    each = parts[0].numel() // size
    blocks = [part[: size * each].view(size, each) for part in parts]
    output = torch.empty(each, dtype=parts[0].dtype)
    dist.reduce_scatter_single(output, blocks[rank])
    expected = summation.reduced_block([block[rank] for block in blocks], rank)
    return [] if same_bits(output, expected) else [f"reduce_scatter of {parts[0].numel()} {parts[0].dtype}"]


def drawn(member: int, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(member), dtype=torch.float32).to(dtype)


@BOTH
def test_types_that_gloo_does_not_take_are_moved_and_added_all_the_same(transport: TransportName) -> None:
    def body(rank: Rank) -> list[str]:
        wrong = []
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex128):
            parts = [torch.tensor([member + 1, 2, 3]).to(dtype) for member in range(rank.size)]
            outputs = [torch.zeros(3).to(dtype) for _ in range(rank.size)]
            dist.all_gather(outputs, parts[rank.rank])
            if not all(same_bits(output, part) for output, part in zip(outputs, parts, strict=True)):
                wrong.append(f"all_gather of {dtype}")
            exchanged = torch.zeros(3).to(dtype)
            dist.all_to_all_single(exchanged, parts[rank.rank])
            if not same_bits(exchanged, torch.stack([plain(part)[rank.rank] for part in parts])):
                wrong.append(f"all_to_all of {dtype}")
        total = torch.tensor([1, -2], dtype=torch.int16)
        dist.all_reduce(total)
        turned = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
        dist.all_reduce(turned)
        return [*wrong, *([] if total.tolist() == [3, -6] else ["int16"]), *([] if turned.tolist() == [-6.0, 3.0] else ["conj"])]

    assert run_ranks(3, body, transport=transport) == [[]] * 3


REFUSED_BY_BOTH = {
    "BAND of floats": lambda group: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group),
    "BXOR of floats, scattered": lambda group: dist.reduce_scatter_single(
        torch.ones(1), torch.ones(1), dist.ReduceOp.BXOR, group=group
    ),
    "AVG of integers": lambda group: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, group=group),
    "PREMUL_SUM": lambda group: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0), group=group),
    "MAX of complex": lambda group: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX, group=group),
    "splits of another sum": lambda group: dist.all_to_all_single(torch.ones(3), torch.ones(3), [2], [2], group=group),
    "splits for more ranks": lambda group: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1], group=group),
    "outputs for more ranks": lambda group: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), group=group),
    "a part of another size": lambda group: dist.gather(torch.ones(3), [torch.ones(2)], group=group, group_dst=0),
    "a negative tag": lambda group: dist.isend(torch.ones(1), group=group, group_dst=0, tag=-1),
    "a send to itself": lambda group: dist.send(torch.ones(1), group=group, group_dst=0),
    "two types": lambda group: dist.all_reduce_coalesced([torch.ones(1), torch.ones(1).double()], group=group),
    "split_group": lambda group: dist.split_group(group, [[0]]),
}


def test_what_gloo_refuses_is_refused_alike() -> None:
    """At the call or at the wait, with some error of Python's; nobody is left in a state that matters."""

    def body(rank: Rank) -> list[str]:
        taken = []
        for name, group in (("tmd", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
            for what, call in REFUSED_BY_BOTH.items():
                try:
                    call(group)
                except (RuntimeError, ValueError, TypeError):
                    continue
                taken.append(f"{what} on {name}")
        total = torch.ones(1)
        dist.all_reduce(total)
        return taken

    assert run_ranks(1, body) == [[]]
