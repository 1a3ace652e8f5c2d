"""A job whose nodes reach the daemon, and one another, over IPv6."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests.daemon.rig import Daemon

#: Four processes that import PyTorch, beside other tests.
DEADLINE_S = 180.0
SCRIPT = """
import torch
from tmd_worker import Session


def main(session):
    model = torch.nn.Linear(1, 1)
    session.track(model=model)
    for step in session.steps(2):
        with step:
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
    print("at the end", session.rank, total.item())


Session.run(main)
"""


def free_port() -> int:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        port: int = probe.getsockname()[1]
        return port


async def test_a_job_runs_over_ipv6(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    port = free_port()
    daemon = make_daemon("--listen", f"[::1]:{port}").start()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "token").write_text(daemon.client.post("/v1/jobs/j1/token")["token"])
    async with contextlib.AsyncExitStack() as ending:
        agents = []
        for node in ("n1", "n2"):
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tmd_worker.agent.main", "--daemon", f"http://[::1]:{port}", "--job-id", "j1"),
                *("--node", node, "--nnodes", "2", "--token-file", str(tmp_path / "token"), str(tmp_path / "train.py")),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            ending.callback(lambda agent=agent: agent.returncode is None and agent.kill())
            agents.append(agent)
        said = [
            output.decode()
            for output, _ in await asyncio.wait_for(asyncio.gather(*(a.communicate() for a in agents)), DEADLINE_S)
        ]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(re.findall(r"at the end (\d) (\S+)", "".join(said))) == [("0", "2.0"), ("1", "2.0")]
