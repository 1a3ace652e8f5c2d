"""Sums of sparse tensors, which gloo takes as well, and DDP with sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.transport.ranks import ALL_WAYS, Rank, run_ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")


def drawn(seed: int, entries: int, shape: tuple[int, ...], sparse_dims: int, dtype: torch.dtype) -> Tensor:
    """Some places more than once. Small whole numbers: their sums are exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randint(0, length, (entries,), generator=generator) for length in shape[:sparse_dims]])
    values = torch.randint(-3, 4, (entries, *shape[sparse_dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(places, values, shape)


@ALL_WAYS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_sparse_tensors_are_those_of_gloo(size: int, transport: TransportName, links: str) -> None:
    """Vectors, matrices, rows of an embedding; members without an entry; large enough for more than one frame."""

    def body(rank: Rank) -> list[str]:
        twin = dist.new_group(backend="gloo")
        wrong = []
        for number, (shape, sparse_dims) in enumerate([((50,), 1), ((40, 30), 2), ((40, 30), 1), ((9, 4, 3), 2)]):
            for dtype in (torch.float32, torch.float64, torch.int64):
                for entries in (20, 20 * (rank.rank % 2), 0, 9000):
                    own = drawn(100 * number + rank.rank, entries, shape, sparse_dims, dtype)
                    expected = own.clone()
                    dist.all_reduce(expected, group=twin)
                    dist.all_reduce(own)
                    same = own.is_sparse and own.is_coalesced() and torch.equal(own.indices(), expected.coalesce().indices())
                    if not same or not torch.equal(own.values(), expected.coalesce().values()):
                        wrong.append(f"{shape} {dtype} {entries}")
        return wrong

    assert run_ranks(size, body, transport=transport, links=links) == [[]] * size


def test_they_are_added_in_order_of_rank() -> None:
    """Which of 1e8, 1 and -1e8 comes first decides what is left."""

    def body(rank: Rank) -> list[float]:
        value = [1e8, 1.0, -1e8][rank.rank]
        tensor = torch.sparse_coo_tensor([[3]], [value], (5,))
        dist.all_reduce(tensor)
        return tensor.to_dense().tolist()

    expected = (torch.tensor(1e8) + torch.tensor(1.0) + torch.tensor(-1e8)).item()
    assert run_ranks(3, body) == [[0.0, 0.0, 0.0, expected, 0.0]] * 3


@BOTH
def test_ddp_with_sparse_gradients_trains_as_on_gloo(transport: TransportName) -> None:
    def body(rank: Rank) -> list[bool]:
        ends = []
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)), process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for step in range(3):
                optimizer.zero_grad()
                model(torch.tensor([rank.rank, 5, 2 + step])).sum().backward()
                optimizer.step()
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
        return [torch.equal(one, other) for one, other in zip(*ends, strict=True)]

    assert run_ranks(2, body, transport=transport) == [[True] * 3] * 2


REFUSED: list[tuple[str, Any]] = [
    ("ReduceOp.SUM", lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
    ("one tensor", lambda tensor: dist.all_reduce_coalesced([tensor, tensor.clone()])),
    ("sparse_coo", lambda tensor: dist.all_reduce(tensor.to_sparse_csr())),
    ("dense CPU tensors", lambda tensor: dist.broadcast(tensor, 0)),
]


@pytest.mark.filterwarnings("ignore:.*_coalesced. will be deprecated:FutureWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(("says", "call"), REFUSED, ids=[says for says, _ in REFUSED])
def test_what_cannot_be_done_is_refused(says: str, call: Any) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(TypeError, match=says):
            call(torch.eye(3).to_sparse())

    run_ranks(1, body)


def test_a_poisoned_sum_leaves_a_valid_value() -> None:
    """As if every member had passed the same."""

    def body(rank: Rank) -> list[float]:
        rank.fabric.sandbox = True
        tensor = torch.sparse_coo_tensor([[1]], [2.0], (3,))
        dist.all_reduce(tensor)
        rank.fabric.sandbox = False
        return tensor.to_dense().tolist()

    assert run_ranks(2, body) == [[0.0, 4.0, 0.0]] * 2
