"""What PyTorch builds on process groups runs on tmd unmodified, and computes what a single process computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.transport.ranks import Rank, run_ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName

#: Below the norm of the gradients, so that clipping does something.
CLIP = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def data(seed: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def after_one_step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The parameters that a single process ends with."""
    (net(x) ** 2).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return [parameter.detach() for parameter in net.parameters()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(got, expected, strict=True))


@BOTH
def test_sharded_data_parallel_with_replicas(transport: TransportName) -> None:
    """FSDP2 over two ranks, replicated twice: all-gather, reduce-scatter, all-reduce, in forward and backward."""

    def body(rank: Rank) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        net = model()
        expected = after_one_step(copy.deepcopy(net), torch.cat([data(seed) for seed in range(4)]))
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        (net(data(rank.rank)) ** 2).mean().backward()
        norm: Any = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        assert whole(norm) > CLIP
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        return same([whole(parameter.detach()) for parameter in net.parameters()], expected)

    assert run_ranks(4, body, transport=transport) == [True] * 4


@BOTH
def test_tensor_parallel_within_data_parallel(transport: TransportName) -> None:
    def body(rank: Rank) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = model()
        expected = after_one_step(copy.deepcopy(net), torch.cat([data(0), data(1)]))
        for block in net:
            parallelize_module(block, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        (net(data(mesh.get_local_rank("dp"))) ** 2).mean().backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(local, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        return same([whole(parameter.detach()) for parameter in net.parameters()], expected)

    assert run_ranks(4, body, transport=transport) == [True] * 4


@BOTH
def test_a_distributed_tensor_changes_its_layout(transport: TransportName) -> None:
    """From rows to columns is an all-to-all; uneven shards are padded and cut."""

    def body(rank: Rank) -> list[bool]:
        mesh = init_device_mesh("cpu", (3,))
        source = torch.arange(70.0).view(7, 10)
        rows = distribute_tensor(source, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        return [
            torch.equal(columns.to_local(), source.tensor_split(3, 1)[rank.rank])
            or torch.equal(columns.to_local(), source.chunk(3, 1)[rank.rank]),
            torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), source),
            torch.equal((rows @ columns.t().contiguous()).full_tensor(), source @ source.t()),
        ]

    assert run_ranks(3, body, transport=transport) == [[True] * 3] * 3


@BOTH
def test_a_pipeline_of_two_stages(transport: TransportName) -> None:
    """Activations and gradients go from stage to stage as messages."""

    def body(rank: Rank) -> bool:
        net = model()
        reference = copy.deepcopy(net)
        x, target = data(0), data(1)
        (reference(x) - target).pow(2).mean().backward()
        stage = PipelineStage(net[rank.rank], rank.rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, wanted: (out - wanted).pow(2).mean())
        if rank.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        got = [parameter.grad for parameter in net[rank.rank].parameters()]
        expected = [parameter.grad for parameter in reference[rank.rank].parameters()]
        return same(got, expected)  # type: ignore[arg-type]

    assert run_ranks(2, body, transport=transport) == [True] * 2
