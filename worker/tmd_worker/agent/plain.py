"""Without a daemon: a plain launcher. Ranks meet over env://; the first that fails ends the others, none is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from tmd_worker.agent import identity
from tmd_worker.agent.environment import rank_environment
from tmd_worker.agent.logs import LogPump
from tmd_worker.agent.processes import Processes, RankProcess, StartFailed, StartOrder
from tmd_worker.agent.settings import PlainSettings
from tmd_worker.agent.stop_signals import STOP_GRACE_S, StopSignals, exit_status

#: The others may take this long to end after one has failed.
FAILURE_GRACE_S = 30.0


def free_port() -> int:
    """A port that nothing listens on now; rank 0's store takes it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PlainNode:
    """The ranks of this node, all started at once."""

    def __init__(self, settings: PlainSettings, pump: LogPump) -> None:
        self._settings = settings
        self.processes = Processes(settings.launch, settings.logs, pump, on_exiting=lambda _: None, on_exited=self._on_exited)
        self._left = settings.nproc_per_node
        #: The first rank that failed, or None once all have ended well.
        self.ended: asyncio.Future[RankProcess | None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Raises StartFailed."""
        for local_rank in range(self._settings.nproc_per_node):
            self.processes.start(self._order(local_rank))

    def _order(self, local_rank: int) -> StartOrder:
        settings = self._settings
        rank = settings.node_rank * settings.nproc_per_node + local_rank
        environment = rank_environment(
            rank=rank,
            local_rank=local_rank,
            world_size=settings.nnodes * settings.nproc_per_node,
            nproc_per_node=settings.nproc_per_node,
            master_addr=settings.master_addr,
            master_port=settings.master_port,
            run_id=settings.run_id,
            threads=identity.rank_threads(settings.nproc_per_node, os.environ),
        )
        name = f"rank{rank}"
        return StartOrder(
            name=name, label=name, local_rank=local_rank, standby=False, environment=environment, keep_stdin=local_rank == 0
        )

    def _on_exited(self, process: RankProcess) -> None:
        self._left -= 1
        if not self.ended.done() and (process.exit_code or self._left == 0):
            self.ended.set_result(process if process.exit_code else None)


async def run(settings: PlainSettings, pump: LogPump, say: Callable[[str], None]) -> int:
    """Returns the exit code: 0, that of the first rank that failed, or 128 + n after a stop signal."""
    node = PlainNode(settings, pump)
    signals = StopSignals(node.processes.signal_all, say)
    try:
        node.start()
        reasons: set[asyncio.Future[Any]] = {node.ended, signals.stopped}
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if signals.stopped.done():
            await node.processes.end_all(STOP_GRACE_S, signum=None)
            return 128 + signals.stopped.result()
        failed = node.ended.result()
        if failed is None:
            return 0
        say(_failure(failed, others=node.processes.any_alive()))
        await node.processes.end_all(FAILURE_GRACE_S)
        return exit_status(failed.exit_code or 1)
    except StartFailed as error:
        say(f"{error}; the ranks started so far are ended")
        await node.processes.end_all(FAILURE_GRACE_S)
        return 1
    finally:
        node.processes.signal_all(signal.SIGKILL)
        node.processes.close()
        signals.ignore_from_now()


def _failure(process: RankProcess, *, others: bool) -> str:
    code = process.exit_code or 0
    how = f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return f"{process.name} (local rank {process.local_rank}, pid {process.pid}) failed: {how}" + (
        "; the other ranks are ended" if others else ""
    )
