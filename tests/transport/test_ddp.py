"""DDP runs on the backend unmodified, in sandbox and live, and a discarded attempt leaves it as it was."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.transport.ranks import Rank, run_ranks
from tests.transports import BOTH
from tmd.protocol.control import TransportName
from tmd_worker.discard import StepDiscarded

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
}
SIZE = 2
STEPS = 3


class Net(nn.Module):
    """Several buckets, buffers, a branch that is not used in every step."""

    def __init__(self, *, branch: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)
        self.branch = nn.Linear(64, 64) if branch else None

    def forward(self, value: torch.Tensor, take_branch: bool) -> torch.Tensor:
        value = torch.relu(self.norm(self.first(value)))
        if self.branch is not None and take_branch:
            value = value + self.branch(value)
        result: torch.Tensor = self.last(torch.relu(self.middle(value)))
        return result


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def built(variant: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(branch=variant == "unused parameters")
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01, **VARIANTS[variant])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    model(batch(step, rank), step % 2 == 0).pow(2).mean().backward()
    optimizer.step()


def digest(model: nn.Module) -> str:
    parts = [value.detach().numpy().tobytes() for value in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def alone(variant: str) -> list[torch.Tensor]:
    """The same training in one process: gradients of both ranks' batches, averaged as DDP does."""
    torch.manual_seed(0)
    net = Net(branch=variant == "unused parameters")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (net(batch(step, rank), step % 2 == 0).pow(2).mean() / SIZE).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@BOTH
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_ddp_trains_as_it_does_in_one_process(variant: str, transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        model, optimizer = built(variant)
        for step in range(STEPS):
            run_step(model, optimizer, step, rank.rank)
        return digest(model), [parameter.detach().tolist() for parameter in model.parameters()]

    results = run_ranks(SIZE, body, transport=transport)
    assert results[0][0] == results[1][0]
    for mine, reference in zip(results[0][1], alone(variant), strict=True):
        torch.testing.assert_close(torch.tensor(mine), reference, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_poison_anywhere_in_a_step_leaves_ddp_able_to_run_it_again(variant: str, transport: TransportName) -> None:
    """1. Two shadow steps in sandbox, reset. 2. Step 1 is poisoned at its n-th collective, rolled back and run again in the
    next epoch. 3. The result is that of a run without poison, bit for bit."""

    def body(rank: Rank, poison_at: int | None) -> Any:
        model, optimizer = built(variant)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        rank.fabric.sandbox = True
        for step in range(2):
            run_step(model, optimizer, step, rank.rank)
        rank.fabric.sandbox = False
        model.load_state_dict(start)
        optimizer.state.clear()
        for step in range(STEPS):
            buffers = [buffer.clone() for buffer in model.buffers()]
            discarded = False
            try:
                if step == 1 and poison_at is not None:
                    poison_after(rank, poison_at)
                optimizer.zero_grad()
                model(batch(step, rank.rank), step % 2 == 0).pow(2).mean().backward()
            except StepDiscarded:
                discarded = True
            if step == 1 and poison_at is not None:
                rank.events.poison(0, "at the latest now")
                assert discarded or rank.events.poisoned_epoch == 0
                rank.fabric.calls._events = rank.events
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
                optimizer.zero_grad(set_to_none=True)
                rank.go_live(next_table(rank))
                model(batch(step, rank.rank), step % 2 == 0).pow(2).mean().backward()
            optimizer.step()
        return digest(model)

    undisturbed = run_ranks(SIZE, functools.partial(body, poison_at=None), transport=transport)
    assert undisturbed[0] == undisturbed[1]
    for poison_at in (1, 2, 4):
        poisoned = run_ranks(SIZE, functools.partial(body, poison_at=poison_at), transport=transport)
        assert poisoned == undisturbed, f"poisoned at {poison_at}"


def poison_after(rank: Rank, calls: int) -> None:
    """From the `calls`-th collective on, this process is poisoned."""
    events = rank.events

    class Counting:
        seen = 0

        def admit(self, *, in_autograd: bool, log_only: bool) -> Any:
            self.seen += 1
            if self.seen == calls:
                events.poison(0, "test")
            return events.admit(in_autograd=in_autograd, log_only=log_only)

    rank.fabric.calls._events = Counting()  # type: ignore[assignment]


def next_table(rank: Rank) -> Any:
    """The same members in epoch 1."""
    import msgspec

    return msgspec.structs.replace(rank.table, epoch=1)


@BOTH
def test_gradient_accumulation_and_clipping(transport: TransportName) -> None:
    def body(rank: Rank) -> Any:
        model, optimizer = built("plain")
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():  # type: ignore[operator]
                model(batch(step, rank.rank), False).pow(2).mean().backward()
            model(batch(step + 10, rank.rank), False).pow(2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        dist.barrier()
        return digest(model), float(norm)

    results = run_ranks(SIZE, body, transport=transport)
    assert results[0] == results[1]
