"""One run of a script to its end, under the daemon or as plain PyTorch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import click

from tmd.demo.ending import uninterrupted
from tmd.demo.stack import Stack

TIMEOUT_S = 600.0


def run_under_tmd(stack: Stack, ranks: int, command: list[str], folder: Path) -> None:
    """All ranks on one node; the logs go beside `folder`. Raises ClickException."""
    job_id = stack.submit(nnodes=1, standby=0, nproc_per_node=ranks, command=command, log_dir=f"{folder}-logs")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        view = stack.job(job_id)
        if view is not None and view["record"]["state"] == "done":
            return
        if view is not None and view["record"]["state"] == "failed":
            raise click.ClickException(f"{job_id} failed: {view['record']['reason']}")
        if time.monotonic() > deadline:
            raise click.ClickException(f"{job_id} has not ended after {TIMEOUT_S:.0f} s")
        time.sleep(0.5)


def run_plain(ranks: int, command: list[str]) -> None:
    """By `tmd-run --standalone`, which is a plain launcher. Raises CalledProcessError or TimeoutExpired."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMD_")} | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "tmd_worker.agent.main", "--standalone", "--nproc-per-node", str(ranks), *command]
    with contextlib.ExitStack() as ending:
        with uninterrupted():
            # In a session of its own: it is ended from here, not by a signal to this group of processes.
            agent = subprocess.Popen(
                launch, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
            ending.callback(_kill, agent)
        code = agent.wait(TIMEOUT_S)
    if code:
        raise subprocess.CalledProcessError(code, launch)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Its ranks end with it."""
    with uninterrupted():
        agent.kill()
        agent.wait()
