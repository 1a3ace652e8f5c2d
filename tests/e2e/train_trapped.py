"""train_small.py with traps in it: something happens to a rank at a place of its life.

Environment: E2E_TRAPS, a JSON list of Trap; E2E_TRAPS_DIR, where a trap that has sprung leaves a marker (the process id), so
that each springs once in a job unless it is to spring `always`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TypedDict

import torch
import train_small
from torch import Tensor

from tmd_worker import Session


class Trap(TypedDict):
    #: build, warm-up, step or end (every step is committed, the process has not left).
    where: str
    rank: int
    #: Of the batch that is drawn.
    step: int
    #: kill, raise, exit or hold (until it is killed).
    action: str
    always: bool


def spring(where: str, session: Session, step: int = 0) -> None:
    """Whatever is set for this rank at this place."""
    traps: list[Trap] = json.loads(os.environ["E2E_TRAPS"])
    for number, trap in enumerate(traps):
        if (trap["where"], trap["rank"], trap["step"]) != (where, session.rank, step):
            continue
        marker = Path(os.environ["E2E_TRAPS_DIR"]) / f"trap-{number}"
        if trap["always"] or not marker.exists():
            marker.write_text(str(os.getpid()))
            act(trap["action"])


def act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ValueError("the user's own bug")
    elif action == "exit":
        sys.exit(3)
    while True:
        time.sleep(1.0)


def main(session: Session) -> None:
    class Batches(train_small.Batches):
        def __init__(self) -> None:
            if session.live:
                spring("build", session)

        def __call__(self, position: int, rank: int) -> tuple[Tensor, Tensor]:
            spring("step" if session.live else "warm-up", session, position)
            return super().__call__(position, rank)

    train_small.Batches = Batches  # type: ignore[misc]
    train_small.main(session)
    spring("end", session)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Session.run(main)
