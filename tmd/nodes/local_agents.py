"""The agents of a local cluster as processes: started, found again, watched to their end, ended when their time is over.

Contract: acts on the lives of the book and notes in them what it did and saw; `LocalCluster` decides and saves. An agent has
a session of its own and nothing ties it to the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tmd.nodes import local_processes as processes
from tmd.nodes.local_state import JobRequest, Life, LocalJob, LocalNode

log = logging.getLogger(__name__)

#: Makes the command of an agent.
AgentCommand = Callable[[JobRequest], Sequence[str]]


def tmd_run(request: JobRequest) -> Sequence[str]:
    """The real agent, in this interpreter."""
    shape = ("--nnodes", str(request.nnodes), "--nproc-per-node", str(request.nproc_per_node))
    return (sys.executable, "-m", "tmd_worker.agent.main", *shape, *request.command)


class LocalAgents:
    """Starts and watches agents. `daemon_address` is what they are told in TMD_DAEMON."""

    def __init__(self, command: AgentCommand, *, daemon_address: str, grace_s: float) -> None:
        self._command = command
        self._daemon_address = daemon_address
        self._grace_s = grace_s
        #: When an agent was first seen gone while something of its life still ran, by the life's mark.
        self._gone_s: dict[str, float] = {}
        #: Lives whose agents are children of this process, not of an earlier daemon.
        self._children: set[str] = set()

    def launch(self, job: LocalJob, life: Life, node: LocalNode) -> None:
        """Raises OSError if the command, the directory or the log cannot be had."""
        with open(life.log, "ab") as output:
            agent = subprocess.Popen(
                self._command(job.request),
                env=self._environment(job, life, node),
                cwd=job.request.cwd or None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            life.start_ticks = processes.start_ticks(agent.pid) or 0
        except OSError:
            # Without it nobody could tell later whether this pid is still the agent.
            agent.kill()
            agent.wait()
            raise
        life.pid = agent.pid
        self._children.add(life.mark)
        # Reaped in _collect_exit: the object itself would complain that its process outlives it, which is the intention here.
        agent.returncode = 0
        log.info("agent started job=%s node=%s pid=%d", job.job_id, life.node, life.pid)

    def _environment(self, job: LocalJob, life: Life, node: LocalNode) -> dict[str, str]:
        environment = dict(os.environ if job.request.env is None else job.request.env)
        for of_another_node in ("TMD_NODE_INDEX", "TMD_INTERFACE"):
            environment.pop(of_another_node, None)
        if life.index is not None:
            environment["TMD_NODE_INDEX"] = str(life.index)
        environment |= {
            processes.MARK_VARIABLE: life.mark,
            "TMD_DAEMON": self._daemon_address,
            "TMD_JOB_ID": job.job_id,
            "TMD_NODE": node.name,
            "TMD_HOST": node.address,
            "TMD_LABELS": ",".join(f"{name}={value}" for name, value in node.labels.items()),
        }
        return environment

    def adopt(self, job: LocalJob, life: Life) -> None:
        """The daemon was killed between the plan to start this agent and the note that it runs."""
        found = [(ticks, pid) for pid in processes.pids_of(life.mark) if (ticks := processes.start_ticks(pid)) is not None]
        if found:
            # The oldest: everything else of the life was started by it.
            life.start_ticks, life.pid = min(found)
            log.info("agent found again job=%s node=%s pid=%d", job.job_id, life.node, life.pid)

    def observe(self, job: LocalJob, life: Life) -> bool:
        """Notes what became of a life that has not ended, and ends it if its time is over. True if something was noted."""
        reaped = self._collect_exit(life)
        if processes.is_alive(life.pid, life.start_ticks):
            self._end_if_unwanted(job, life)
        elif reaped is not None and self._nothing_left(life):
            life.ended_s = time.time()
            fields = {"job": job.job_id, "node": life.node, "pid": life.pid, "exit_code": life.exit_code}
            log.info("agent ended", extra=fields)
            return True
        return bool(reaped)

    def _collect_exit(self, life: Life) -> bool | None:
        """True: the exit code was noted now; False: nothing (more) to note; None: the kernel is not done with the process."""
        if life.mark not in self._children:
            return False
        try:
            pid, status = os.waitpid(life.pid, os.WNOHANG)
        except ChildProcessError:
            # Reaped by the kernel: this daemon was started with SIGCHLD ignored. Nobody will ever know the exit code.
            self._children.discard(life.mark)
            return False
        if pid == 0:
            return None
        self._children.discard(life.mark)
        life.exit_code = os.waitstatus_to_exitcode(status)
        return True

    def _end_if_unwanted(self, job: LocalJob, life: Life) -> None:
        since = life.released_s if life.released_s is not None else job.cancelled_s
        if since is not None and time.time() - since >= self._grace_s:
            log.warning("agent outlived its time, killed job=%s node=%s pid=%d", job.job_id, life.node, life.pid)
            processes.signal_all(life.mark, signal.SIGKILL, first=life.pid)

    def _nothing_left(self, life: Life) -> bool:
        """The agent is gone. What it left behind has the grace to end by itself."""
        if not processes.pids_of(life.mark):
            self._gone_s.pop(life.mark, None)
            return True
        since = self._gone_s.setdefault(life.mark, time.monotonic())
        if time.monotonic() - since >= self._grace_s:
            processes.signal_all(life.mark, signal.SIGKILL)
        return False

    async def kill(self, life: Life) -> None:
        """SIGKILL to all of it, the agent first; returns once none is left. Raises TimeoutError."""
        await asyncio.to_thread(processes.kill_all, life.mark, first=life.pid)

    async def signal_all(self, life: Life, number: signal.Signals) -> None:
        """To every process of the life, again until none is new: one may have been forked meanwhile."""
        before = -1
        while (reached := await asyncio.to_thread(processes.signal_all, life.mark, number, first=life.pid)) != before:
            before = reached

    @staticmethod
    def terminate(life: Life) -> None:
        """SIGTERM to the agent alone: it sees to its ranks."""
        processes.signal_leader(life.mark, life.pid, signal.SIGTERM)
