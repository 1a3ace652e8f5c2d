"""A training script for the tests: small, with everything in it that must come through a migration bit by bit.

Arguments: folder, steps, then names of variants. Writes loss-<rank>-<pid>.jsonl, and digest-<rank>.txt at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.session.autograd_faults import fault_in_backward
from tests.session.exchanging import exchanged
from tests.session.gan import train_gan
from tests.transport.starving import no_descriptor_left
from tmd_worker import Session, faults
from tmd_worker.step import Step
from tmd_worker.transport.process import current

FEATURES = 24
UNHURRIED_S = 0.02
#: The step at whose end the variant "destroys" is done with a group that it has made before the first one.
DESTROYED_IN = 2
#: Combinations that every kind of migration must bring through bit by bit.
VARIANTS = [
    ("plain",),
    ("batchnorm",),
    ("batchnorm", "accumulate"),
    ("batchnorm", "scaler"),
    ("scaler", "fused"),
    ("unused",),
    ("static",),
    ("static", "unused"),
    ("views",),
    ("views", "static", "keep_gradients"),
    ("views", "batchnorm", "accumulate", "keep_gradients"),
    ("ema_module",),
    ("noisy_tail",),
    ("gan",),
    ("thaw",),
    ("exchange",),
    ("sparse",),
]


class Batches:
    """Batches that depend on rank and position alone."""

    def __call__(self, position: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100_003 * rank + position)
        return torch.randn(8, FEATURES, generator=generator), torch.randn(8, 4, generator=generator)


class Net(nn.Module):
    def __init__(self, variants: set[str]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 48)
        self.norm = nn.BatchNorm1d(48) if "batchnorm" in variants else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.middle = nn.Linear(48, 48)
        self.last = nn.Linear(48, 4)
        self.unused = nn.Linear(4, 4) if "unused" in variants else None
        self.exchanges = "exchange" in variants
        self.looked_up = nn.Embedding(7, FEATURES, sparse=True) if "sparse" in variants else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        faults.point("forward")
        if self.looked_up is not None:
            x = x + self.looked_up((10 * x[:, 0]).long().remainder(7))
        x = fault_in_backward(self.drop(torch.relu(self.norm(self.first(x)))))
        if self.exchanges:
            x = exchanged(x)
        return self.last(self.drop(torch.relu(self.middle(x))))


class Averaged:
    """An exponential moving average that the user keeps by hand, updated after the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].mul_(0.9).add_(parameter, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


def train(session: Session, folder: Path, total: int, variants: set[str]) -> None:
    session.on_role(lambda rank: (folder / f"role-{rank}.txt").write_text(str(rank)))

    def begin(step: Step) -> None:
        misbehave(session, step, variants)
        if "unhurried" in variants and not step.shadow:
            time.sleep(UNHURRIED_S)  # leaves the processors to those who start
        if not step.shadow and step.index == int(os.environ.get("TMD_TEST_GATE", "-1")):
            starved = "starved" in variants and session.rank == 2
            with no_descriptor_left() if starved else contextlib.nullcontext():
                wait_for(folder / "go")

    def log(step: Step, loss: torch.Tensor) -> None:
        if step.committed:
            write_loss(folder, session.rank, step.index, loss)

    if "gan" in variants:
        train_gan(session, total, Batches(), FEATURES, begin=begin, log=log)
    else:
        train_one(session, folder, total, variants, begin, log)
    digest = session.digest()
    if "evaluate" in variants:
        seen = torch.ones(())
        dist.all_reduce(seen)
        assert seen.item() == session.world_size
    (folder / f"digest-{session.rank}.txt").write_text(json.dumps(digest, sort_keys=True))


def train_one(
    session: Session,
    folder: Path,
    total: int,
    variants: set[str],
    begin: Callable[[Step], None],
    log: Callable[[Step, torch.Tensor], None],
) -> None:
    """One model and one optimizer."""
    torch.manual_seed(7)
    net = Net(variants)
    model = DistributedDataParallel(
        net,
        bucket_cap_mb=0.005,
        find_unused_parameters="unused" in variants,
        static_graph="static" in variants,
        gradient_as_bucket_view="views" in variants,
    )
    trained = [part for name, part in model.named_parameters() if "thaw" not in variants or "last" not in name]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=3e-3, fused="fused" in variants)
    if net.looked_up is not None:
        optimizer = torch.optim.SGD(trained, lr=3e-3)  # AdamW takes no sparse gradients
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    averaged = Averaged(net)
    ema = AveragedModel(net, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new) if "ema_module" in variants else None
    # The scale overflows at first and, growing again, every few steps: some steps are skipped by the scaler.
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in variants, init_scale=2.0**127, growth_interval=2)
    session.track(model=model, optimizer=optimizer, schedule=schedule, averaged=averaged, data=Batches())
    if "forgotten" not in variants:
        session.track(scaler=scaler)
    idle = nn.Linear(1, 1) if "idle" in variants else None
    extra = dist.new_group() if "destroys" in variants else None
    if ema is not None:
        session.track(ema=ema)
    if "excused" in variants:
        session.untracked(idle)
    torch.manual_seed(1000 + session.rank)
    np.random.seed(session.rank)
    random.seed(session.rank)
    accumulate = 3 if "accumulate" in variants else 1
    weight = 64.0 if "scaler" in variants else 1.0
    for step in session.steps(total):
        with step:
            begin(step)
            if extra is not None and step.index <= DESTROYED_IN:
                dist.all_reduce(torch.ones(1000), group=extra)
            if "passing" in variants:
                make_use_destroy(session)
            model.zero_grad(set_to_none="keep_gradients" not in variants)
            if "thaw" in variants and step.index >= 2 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 1e-3})
            loss = torch.zeros(())
            for micro in range(accumulate):
                x, y = step.batch if micro == 0 else step.next_batch()
                with contextlib.nullcontext() if micro == accumulate - 1 else model.no_sync():
                    part = weight * (model(x) - y).pow(2).mean() / accumulate
                    scaler.scale(part).backward()
                loss = loss + part.detach()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([part for part in model.parameters() if not _is_sparse(part.grad)], 1.0)
            scaler.step(optimizer)
            scaler.update()
        if "thaw" not in variants:
            schedule.step()
        averaged.update(net)
        if ema is not None:
            ema.update_parameters(net)
        if "noisy_tail" in variants:
            torch.rand(1)
        if "mean_loss" in variants:
            with session.log_only():
                dist.all_reduce(loss)
        if "careless" in variants:
            dist.all_reduce(loss)
        if extra is not None and step.committed and step.index == DESTROYED_IN:
            dist.destroy_process_group(extra)
        if "break" in variants and step.index == 3:
            break
        if step.committed and "links" in variants:
            write_links(folder, session.rank, step.index)
        log(step, loss)


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def misbehave(session: Session, step: Step, variants: set[str]) -> None:
    """What a user's script may do wrong, on rank 1 in step 3."""
    if step.index != 3 or not session.live:
        return
    if "disagree" in variants:
        dist.all_reduce(torch.ones(3 + session.rank))
    if session.rank != 1:
        return
    if "crash" in variants:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "bug" in variants:
        raise ValueError("a bug in the user's script")
    if "exit" in variants:
        sys.exit(0)


def make_use_destroy(session: Session) -> None:
    """A group that lives within one step."""
    group = dist.new_group()
    total = torch.ones(1000)
    dist.all_reduce(total, group=group)
    assert total[0].item() == session.world_size
    dist.destroy_process_group(group)


def wait_for(path: Path) -> None:
    """The test lets the step go on by making this file."""
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not come"
        time.sleep(0.002)


def write_loss(folder: Path, rank: int, step: int, loss: torch.Tensor) -> None:
    with (folder / f"loss-{rank}-{os.getpid()}.jsonl").open("a") as out:
        out.write(json.dumps({"rank": rank, "step": step, "loss": float(loss).hex()}) + "\n")


def write_links(folder: Path, rank: int, step: int) -> None:
    """Every link of this rank as the operating system knows it: group, peer, descriptor, both addresses."""
    links = [
        [group, peer, link.fd, list(link.local), list(link.remote)]
        for group, peers in current().links().items()
        for peer, link in peers.items()
    ]
    with (folder / f"links-{rank}.jsonl").open("a") as out:
        out.write(json.dumps({"rank": rank, "step": step, "pid": os.getpid(), "links": sorted(links)}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, steps, *names = sys.argv[1:]
    Session.run(lambda session: train(session, Path(directory), int(steps), set(names)))
