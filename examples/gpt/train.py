"""Trains a small GPT on the standard library's sources, with data parallelism, under tmd, torchrun or alone.

    tmctl local run --nodes 4 --standby 2 -- examples/gpt/train.py --steps 60 --out out/gpt
    tmd-run --standalone --nproc-per-node 2 examples/gpt/train.py
    python examples/gpt/train.py --steps 20

With --out every rank appends the loss of each committed step to losses-rankR.jsonl, bit for bit as a hexadecimal float, and
leaves digests of its final state in final-rankR.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch
from corpus import Batches, standard_library
from model import GPT, Shape
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd_worker import Session

WARM_UP_STEPS = 10


def main(session: Session) -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(Shape(width=args.width, layers=args.layers, context=args.seq_len))
    if session.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, args.steps))
    data = Batches(
        standard_library(),
        batch=args.batch,
        length=args.seq_len,
        seed=args.seed,
        rank=session.rank,
        world_size=session.world_size,
    )
    # Every rank drops out other units.
    torch.manual_seed(args.seed * 1000 + session.rank)
    session.track(model=model, optimizer=optimizer, schedule=schedule, data=data)
    # Only shown: whoever takes rank 0 over begins it anew.
    recent: deque[float] = deque(maxlen=10)
    session.untracked(recent)

    for step in session.steps(args.steps):
        began_s = time.monotonic()
        with step:
            optimizer.zero_grad()
            loss = model(*step.batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        time.sleep(max(0.0, began_s + args.step_floor_ms / 1000 - time.monotonic()))
        if step.committed:
            recent.append(loss.item())
            log_step(args.out, session.rank, step.index, data.epoch, loss.item())
            if session.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index}: loss {statistics.fmean(recent):.4f} (mean of {len(recent)})", flush=True)
    log_end(args.out, session.rank, model, optimizer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Byte-level GPT on the standard library's sources.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="windows of text in a batch, for each rank")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=Shape.width, help="numbers that stand for a byte, a multiple of 8")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="transformer blocks")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for losses and digests; default: none are written")
    parser.add_argument("--step-floor-ms", type=float, default=0.0, help="a step takes at least this long")
    return parser.parse_args()


def share_of_rate(step: int, steps: int) -> float:
    """Of the learning rate: rises over the first steps, AdamW's moments being guesses then, and falls to a tenth on a cosine."""
    risen = min(1.0, (step + 1) / WARM_UP_STEPS)
    return risen * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def log_step(out: Path | None, rank: int, step: int, epoch: int, loss: float) -> None:
    """One line for a committed step. A rank that is lost between a commit and this line leaves it unwritten."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"step": step, "epoch": epoch, "loss": loss.hex(), "time": time.time()})
    with (out / f"losses-rank{rank}.jsonl").open("a") as log:
        log.write(line + "\n")


def log_end(out: Path | None, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Digests of everything that decides how the training would go on."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    moments = [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor)
    ]
    digests = {
        "parameters": digest(model.state_dict().values()),
        "optimizer": digest(moments),
        "learning_rate": float(optimizer.param_groups[0]["lr"]).hex(),
        "rng": digest([torch.get_rng_state()]),
    }
    (out / f"final-rank{rank}.json").write_text(json.dumps({"rank": rank, "pid": os.getpid(), "digests": digests}) + "\n")


def digest(tensors: Iterable[Tensor]) -> str:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


if __name__ == "__main__":
    Session.run(main)
