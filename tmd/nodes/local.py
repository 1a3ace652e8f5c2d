"""Nodes as groups of processes on this machine: the resource manager for a first look, the demo and the tests.

Contract: a node runs at most one job's agent (`tmd-run`), which survives the daemon; a daemon that starts again finds it by
what is on disk. As with a real resource manager, a node that is killed or frozen is called down only after a while: whoever
wants to know sooner must look at the agents. What an operator sets down is known at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tmd.core.records import NodeState
from tmd.nodes.base import InvalidRequest, NodeEvent, NodeView, QueryFailed, RequestRefused, UnknownJob, UnknownNode
from tmd.nodes.local_agents import AgentCommand, LocalAgents, tmd_run
from tmd.nodes.local_processes import kill_all
from tmd.nodes.local_record import Record
from tmd.nodes.local_state import Book, JobRequest, Life, LocalJob, LocalNode, LocalSettings, NodeMarks
from tmd.nodes.local_views import node_view, way_up

log = logging.getLogger(__name__)

#: Killing a node may take this long: the kernel frees its memory first.
KILL_TIMEOUT_S = 10.0


class LocalCluster:
    """The nodes of this machine; implements tmd.nodes.base.ResourceManager.

    Use: `start`, then anything while `run` runs, then `close`. What changes a node or a job raises NotRecorded, and changes
    nothing, while the disk takes nothing.
    """

    def __init__(
        self,
        settings: LocalSettings,
        state_dir: Path,
        *,
        daemon_address: str,
        agent_command: AgentCommand = tmd_run,
    ) -> None:
        """`daemon_address` is what agents are told in TMD_DAEMON. Raises ValueError on settings that make no cluster."""
        self._settings = settings
        self._nodes = {node.name: node for node in settings.expand()}
        self._directory = state_dir / "local"
        self._record = Record(_book_file(state_dir), self._ring)
        self._agents = LocalAgents(agent_command, daemon_address=daemon_address, grace_s=settings.release_grace_s)
        self._lock = asyncio.Lock()
        self._bell = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Reads what an earlier daemon left. Raises ValueError or OSError if that cannot be read."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._record.load()
        for job, life in self._unended():
            if life.pid == 0:
                self._agents.adopt(job, life)
        self._reconcile()

    async def run(self) -> None:
        """Watches the agents, until cancelled. What is in the way for a while is logged once, and again when it is over."""
        trouble: OSError | None = None
        while True:
            await asyncio.sleep(self._settings.poll_s)
            try:
                self._reconcile()
            except OSError as error:
                if trouble is None:
                    log.error("local agents cannot be watched: %s; trying again every %g s", error, self._settings.poll_s)
                trouble = error
            else:
                if trouble is not None:
                    log.info("local agents are watched again")
                trouble = None

    async def close(self) -> None:
        self._closed = True
        self._ring()

    # ---------------------------------------------------------------- the border

    async def nodes(self) -> list[NodeView]:
        return [self._view(node) for node in self._nodes.values()]

    async def drain(self, node: str, reason: str) -> None:
        marks = self._marks(node)
        if marks.drain is None:
            with self._record.decision(f"node {node} is not drained", marks):
                marks.drain = reason

    async def resume(self, node: str) -> None:
        marks = self._marks(node)
        if marks.drain is None:
            raise RequestRefused(f"node {node} is not drained, it is {self._view(self._nodes[node]).state}", self._way_up(node))
        with self._record.decision(f"node {node} is not resumed", marks):
            marks.drain = None

    async def release(self, job_id: str, node: str) -> None:
        self._known(node)
        job = self._book.jobs.get(job_id)
        life = job.life_on(node) if job is not None else None
        if life is not None and life.released_s is None:
            with self._record.decision(f"node {node} is not released by job {job_id}", life):
                life.released_s = time.time()

    async def watch(self) -> AsyncIterator[NodeEvent]:
        told: dict[str, tuple[NodeState, str]] = {}
        while not self._closed:
            bell = self._bell
            for view in [self._view(node) for node in self._nodes.values()]:
                news = (view.meaning, view.reason)
                if told.get(view.name) != news:
                    told[view.name] = news
                    yield NodeEvent(node=view.name, state=news[0], reason=news[1])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), self._settings.poll_s)

    # ---------------------------------------------------------------- jobs

    async def submit(self, request: JobRequest) -> str:
        """Starts one agent on each of nnodes + standby free nodes; returns the job's id.

        Raises InvalidRequest, RequestRefused.
        """
        if problem := request.problem():
            raise InvalidRequest(f"job not started: {problem}", "tmctl local run --nodes 2 --standby 1 -- train.py")
        async with self._lock:
            await self._until_settled()
            chosen = self._choose(request)
            job = LocalJob(job_id=f"local-{self._book.job_counter + 1}", request=request, created_s=time.time())
            log_dir = self._log_dir(job)
            job.lives = [self._new_life(job, node, log_dir, index=index) for index, node in enumerate(chosen)]
            with self._record.decision("job not started", self._book):
                self._book.job_counter += 1
                self._book.jobs = {**self._book.jobs, job.job_id: job}
            try:
                for life in job.lives:
                    self._launch(job, life)
            except (OSError, ValueError) as error:
                self._call_off(job)
                raise RequestRefused(f"job not started: {error}", _remedy(error)) from None
            return job.job_id

    def _log_dir(self, job: LocalJob) -> Path:
        """Raises RequestRefused if it cannot be made."""
        path = Path(job.request.log_dir) if job.request.log_dir else self._directory / "jobs" / job.job_id
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise RequestRefused(f"job not started: no logs can be written to {path}: {error}", "name another one") from None
        return path

    def _call_off(self, job: LocalJob) -> None:
        """An agent could not be started: the job is forgotten, or ended where others were started before."""
        if any(life.pid for life in job.lives):
            job.cancelled_s = 0.0
        else:
            del self._book.jobs[job.job_id]
        self._record.note()

    def jobs(self) -> list[LocalJob]:
        """All that are known, oldest first."""
        return list(self._book.jobs.values())

    def job(self, job_id: str) -> LocalJob:
        """Raises UnknownJob, which names the known ones."""
        job = self._book.jobs.get(job_id)
        if job is None:
            known = ", ".join(self._book.jobs) or "none"
            raise UnknownJob(f"no local job {job_id}; known: {known}", "tmctl jobs")
        return job

    async def cancel(self, job_id: str) -> None:
        """SIGTERM to the job's agents; what still runs after the grace is killed. Raises UnknownJob."""
        job = self.job(job_id)
        if job.cancelled_s is not None:
            return
        with self._record.decision(f"job {job_id} is not cancelled", job):
            job.cancelled_s = time.time()
        for life in job.lives:
            if life.ended_s is None:
                self._agents.terminate(life)

    # ---------------------------------------------------------------- faults

    async def kill(self, node: str) -> None:
        """The node loses power: SIGKILL to everything on it, without a word to anybody. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if marks.off:
                raise RequestRefused(f"node {node} is off already", self._way_up(node))
            with self._record.decision(f"node {node} is not killed", marks):
                marks.killed_s, marks.frozen_s = time.time(), None
            await self._kill_processes(node)

    async def freeze(self, node: str) -> None:
        """SIGSTOP to everything on the node. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if marks.off or marks.frozen_s is not None:
                raise RequestRefused(f"node {node} is off or frozen already", self._way_up(node))
            with self._record.decision(f"node {node} is not frozen", marks):
                marks.frozen_s = time.time()
            await self._signal_processes(node, signal.SIGSTOP)

    async def thaw(self, node: str) -> None:
        """SIGCONT to everything on a frozen node. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if marks.frozen_s is None:
                raise RequestRefused(f"node {node} is not frozen", self._way_up(node))
            with self._record.decision(f"node {node} is not thawed", marks):
                marks.frozen_s = None
            await self._signal_processes(node, signal.SIGCONT)

    async def set_down(self, node: str, reason: str = "set down by an operator") -> None:
        """DOWN at once, and everything on it is killed. Raises UnknownNode."""
        async with self._lock:
            marks = self._marks(node)
            with self._record.decision(f"node {node} is not set down", marks):
                marks.down, marks.frozen_s = reason, None
            await self._kill_processes(node)

    async def come_back(self, node: str) -> str | None:
        """A node that is off boots: a new life, offered to the job that ran there if it still runs (its id is returned). So is
        one that this job has given back.

        Raises UnknownNode, RequestRefused.
        """
        async with self._lock:
            marks = self._marks(node)
            self._reconcile()
            job = self._last_job(node) if marks.drain is None else None
            if not marks.off and (job is None or self._lives_on(node)):
                raise RequestRefused(f"node {node} is not off, it is {self._view(self._nodes[node]).state}", self._way_up(node))
            with self._record.decision(f"node {node} is not booted", marks, *([job] if job else [])):
                marks.down = marks.killed_s = marks.frozen_s = None
                life = self._next_life(job, node) if job else None
            if job is None or life is None:
                return None
            try:
                self._launch(job, life)
            except (OSError, ValueError) as error:
                raise RequestRefused(f"node {node} is back, but without its agent: {error}", _remedy(error)) from None
            return job.job_id

    def _next_life(self, job: LocalJob, node: str) -> Life:
        """Added to the job, which has run on this node before."""
        before = job.life_on(node)
        assert before is not None, "the job ran here last"
        life = self._new_life(job, self._nodes[node], Path(before.log).parent, index=None)
        job.lives = [*job.lives, life]
        return life

    # ---------------------------------------------------------------- what is where

    @property
    def _book(self) -> Book:
        return self._record.book

    def _known(self, node: str) -> LocalNode:
        if node not in self._nodes:
            raise UnknownNode(f"no node {node}; known: {', '.join(self._nodes)}", "tmctl nodes")
        return self._nodes[node]

    def _marks(self, node: str) -> NodeMarks:
        return self._book.marks_of(self._known(node).name)

    def _way_up(self, node: str) -> str:
        return way_up(node, self._book.marks_of(node))

    def _unended(self) -> list[tuple[LocalJob, Life]]:
        return [(job, life) for job in self._book.jobs.values() for life in job.lives if life.ended_s is None]

    def _lives_on(self, node: str) -> list[Life]:
        return [life for _, life in self._unended() if life.node == node]

    def _last_job(self, node: str) -> LocalJob | None:
        """The running job that was on this node last."""
        jobs = [job for job in self._book.jobs.values() if job.life_on(node) and job.runs() and job.cancelled_s is None]
        return jobs[-1] if jobs else None

    def _view(self, node: LocalNode) -> NodeView:
        return node_view(node, self._book, self._settings.notice_s)

    def _choose(self, request: JobRequest) -> list[LocalNode]:
        """The first free nodes. Raises RequestRefused with what stands against it."""
        wanted = request.nnodes + request.standby
        if request.cwd and not os.path.isdir(request.cwd):
            raise RequestRefused(f"job not started: {request.cwd} is not a directory", "run tmctl from an existing directory")
        free, busy = [], []
        for node in self._nodes.values():
            view, marks = self._view(node), self._book.marks_of(node.name)
            if view.state == "IDLE" and not marks.off and marks.frozen_s is None:
                free.append(node)
            else:
                busy.append(f"{node.name} {view.state}{' of ' + ', '.join(view.jobs) if view.jobs else ''}")
        if len(free) < wanted:
            raise RequestRefused(
                f"job not started: {wanted} nodes wanted ({request.nnodes} and {request.standby} standby), {len(free)} free of "
                f"{len(self._nodes)} ({'; '.join(busy) or 'all are free'})",
                "ask for fewer nodes, end a job (tmctl job cancel), resume a node, or raise nodes in [local]",
            )
        return free[:wanted]

    # ---------------------------------------------------------------- processes

    @staticmethod
    def _new_life(job: LocalJob, node: LocalNode, log_dir: Path, *, index: int | None) -> Life:
        number = sum(life.node == node.name for life in job.lives) + 1
        log_path = str(log_dir / f"{node.name}.log")
        mark = secrets.token_hex(16)
        return Life(mark=mark, node=node.name, number=number, index=index, log=log_path, started_s=time.time())

    def _launch(self, job: LocalJob, life: Life) -> None:
        """Raises OSError or ValueError if the agent cannot be started."""
        self._agents.launch(job, life, self._nodes[life.node])
        self._record.note()

    async def _kill_processes(self, node: str) -> None:
        """Returns once nothing is left on the node and that is noted."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        try:
            for life in self._lives_on(node):
                await self._agents.kill(life)
            while self._lives_on(node):
                self._reconcile()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"its agent outlives SIGKILL by {KILL_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.002)
        except TimeoutError as error:
            raise QueryFailed(f"node {node}: {error}", "look at its processes with ps: the kernel holds them") from None
        except OSError as error:
            what = f"node {node} is being killed, but its processes cannot be looked at: {error}"
            raise QueryFailed(what, f"set it down once that is mended: tmctl local down {node}") from None

    async def _until_settled(self) -> None:
        """Waits, not for ever, for nodes that are being given back: they are as good as free."""
        deadline = time.monotonic() + self._settings.release_grace_s + KILL_TIMEOUT_S
        while time.monotonic() < deadline and any(view.base == "COMPLETING" for view in await self.nodes()):
            await asyncio.sleep(self._settings.poll_s)

    async def _signal_processes(self, node: str, number: signal.Signals) -> None:
        for life in self._lives_on(node):
            await self._agents.signal_all(life, number)

    def _reconcile(self) -> None:
        """Notes what became of the agents. Raises OSError if that cannot be seen of all of them."""
        noted = False
        try:
            for job, life in self._unended():
                noted |= self._agents.observe(job, life)
        finally:
            self._record.note() if noted else self._record.catch_up()

    def _ring(self) -> None:
        """Wakes every watch."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()


def kill_what_is_left(state_dir: Path) -> None:
    """SIGKILL to everything that the nodes of this directory still run, for whoever is done with them. Their daemon must be gone.

    Raises ValueError if the book cannot be read, TimeoutError if a process outlives it.
    """
    for job in Book.load(_book_file(state_dir)).jobs.values():
        for life in job.lives:
            if life.ended_s is None:
                kill_all(life.mark, first=life.pid)


def _book_file(state_dir: Path) -> Path:
    return state_dir / "local" / "cluster.json"


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.E2BIG:
        return "command and environment are too long together for one program (getconf ARG_MAX): unset variables"
    return "see that command and directory exist and that logs can be written"
