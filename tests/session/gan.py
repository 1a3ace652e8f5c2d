"""Two models and two optimizers, the first of which steps before the last backward of the step: what undo=True is for."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.session.autograd_faults import fault_in_backward
from tmd_worker import Session, faults
from tmd_worker.step import Step

NOISE = 6

Batch = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class Player(nn.Module):
    """Generator or discriminator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        faults.point("forward")
        x = fault_in_backward(torch.relu(self.norm(self.first(x))))
        return self.last(nn.functional.dropout(x, 0.1, self.training))


def train_gan(
    session: Session,
    total: int,
    data: Batch,
    features: int,
    *,
    begin: Callable[[Step], None],
    log: Callable[[Step, torch.Tensor], None],
) -> None:
    """The discriminator steps on real and made samples, then the generator through the stepped discriminator. `begin` is called
    first in each body, `log` after it with the sum of both losses."""
    torch.manual_seed(7)
    generator = DistributedDataParallel(Player(NOISE, features))
    discriminator = DistributedDataParallel(Player(features, 1))
    optimizer_g = torch.optim.AdamW(generator.parameters(), lr=2e-3)
    optimizer_d = torch.optim.AdamW(discriminator.parameters(), lr=2e-3)
    schedule_d = torch.optim.lr_scheduler.ExponentialLR(optimizer_d, 0.97)
    session.track(generator=generator, discriminator=discriminator, optimizer_g=optimizer_g, schedule_d=schedule_d, data=data)
    session.track(optimizer_d=optimizer_d, undo=True)
    torch.manual_seed(1000 + session.rank)
    np.random.seed(session.rank)
    random.seed(session.rank)
    for step in session.steps(total):
        with step:
            begin(step)
            real, _ = step.batch
            made = generator(torch.randn(len(real), NOISE))
            optimizer_d.zero_grad()
            signs = torch.cat([-torch.ones(len(real), 1), torch.ones(len(real), 1)])
            loss_d = nn.functional.softplus(signs * discriminator(torch.cat([real, made.detach()]))).mean()
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = nn.functional.softplus(-discriminator(made)).mean()
            loss_g.backward()
            optimizer_g.step()
        schedule_d.step()
        log(step, loss_d.detach() + loss_g.detach())
