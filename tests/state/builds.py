"""Small training scripts for the tests of the state: a model with everything that makes state, and one step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from tmd_worker.state import rng
from tmd_worker.state.tracked import Tracked

MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def cosine(optimizer: Optimizer) -> LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def network() -> nn.Module:
    """BatchNorm, dropout, two layers that share a weight, and one whose weight lies in memory in the other order."""
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
    )
    net[4].weight = net[3].weight
    net[5].weight = nn.Parameter(net[5].weight.detach().t().contiguous().t())
    return net


@dataclasses.dataclass
class Build:
    """One process's training, as its script would build it."""

    tracked: Tracked
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], float]

    @contextmanager
    def own_rng(self) -> Iterator[None]:
        """Two builds in one test process share the generators; inside, only this one draws from them."""
        before = rng.capture()
        try:
            yield
        finally:
            rng.restore(before)


def build(seed: int = 0, *, optimizer: MakeOptimizer = adamw, scheduler: MakeScheduler = cosine, scaled: bool = False) -> Build:
    """A model with BatchNorm, dropout and an average of itself; different seeds give different everything but data."""
    torch.manual_seed(seed)
    model = network()
    stepper = optimizer(model.parameters())
    schedule = scheduler(stepper)
    average = AveragedModel(model, use_buffers=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10, growth_interval=3)
    samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(99))
    data = DataLoader(TensorDataset(samples), batch_size=8, shuffle=True)
    tracked = Tracked()
    tracked.set_role(0, 1)
    tracked.add("model", model)
    tracked.add("optimizer", stepper)
    tracked.add("scheduler", schedule)
    tracked.add("average", average)
    tracked.add("scaler", scaler)
    tracked.add("data", data)

    def step() -> float:
        (batch,) = tracked.loaders["data"].next()
        stepper.zero_grad()
        loss = model(batch).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        schedule.step()
        average.update_parameters(model)
        return float(loss.detach())

    return Build(tracked, model, stepper, step)


def warmed(seed: int) -> Build:
    """A standby: built, two shadow steps, reset, with the memory of its optimizer state kept."""
    made = build(seed)
    before = made.tracked.snapshot_all()
    made.step()
    made.step()
    made.tracked.restore_all(before, keep_allocated=True)
    return made


def run(made: Build, steps: int) -> list[float]:
    return [made.step() for _ in range(steps)]


#: Every optimizer, scheduler and scaler whose state must come through.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw, tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}
SCHEDULERS: dict[str, MakeScheduler] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=200, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}
BUILDS: dict[str, Callable[[int], Build]] = {
    **{f"optimizer {name}": lambda seed, make=make: build(seed, optimizer=make) for name, make in OPTIMIZERS.items()},
    **{f"scheduler {name}": lambda seed, make=make: build(seed, scheduler=make) for name, make in SCHEDULERS.items()},
    "scaler": lambda seed: build(seed, scaled=True),
}
