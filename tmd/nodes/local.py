"""Nodes as groups of processes on this machine: the resource manager for a first look, the demo and the tests.

Contract: a node runs at most one job's agent (`tmd-run`), which survives the daemon; a daemon that starts again finds it by
what is on disk. As with a real resource manager, a node that is killed or frozen is called down only after a while: whoever
wants to know sooner must look at the agents. What an operator sets down is known at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tmd.core.records import NodeState
from tmd.nodes.base import NodeEvent, NodeView, QueryFailed, RequestRefused, UnknownJob, UnknownNode
from tmd.nodes.local_agents import AgentCommand, LocalAgents, tmd_run
from tmd.nodes.local_state import Book, JobRequest, Life, LocalJob, LocalNode, LocalSettings, NodeMarks

#: Killing a node may take this long: the kernel frees its memory first.
KILL_TIMEOUT_S = 10.0


class LocalCluster:
    """The nodes of this machine; implements tmd.nodes.base.ResourceManager. Use: `start`, then anything, then `close`."""

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
        self._path = self._directory / "cluster.json"
        self._agents = LocalAgents(agent_command, daemon_address=daemon_address, grace_s=settings.release_grace_s)
        self._book = Book()
        self._lock = asyncio.Lock()
        self._bell = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Reads what an earlier daemon left. Raises ValueError if that cannot be read."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._book = Book.load(self._path)
        for job, life in self._unended():
            if life.pid == 0:
                self._agents.adopt(job, life)
        self._reconcile()
        self._poller = asyncio.create_task(self._poll(), name="local nodes")

    async def close(self) -> None:
        self._closed = True
        self._ring()
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller

    # ---------------------------------------------------------------- the border

    async def nodes(self) -> list[NodeView]:
        return [self._view(node) for node in self._nodes.values()]

    async def drain(self, node: str, reason: str) -> None:
        marks = self._marks(node)
        if marks.drain is None:
            marks.drain = reason
            self._save()

    async def resume(self, node: str) -> None:
        marks = self._marks(node)
        if marks.drain is None:
            raise RequestRefused(f"node {node} is not drained, it is {self._view(self._nodes[node]).state}", self._way_up(node))
        marks.drain = None
        self._save()

    async def release(self, job_id: str, node: str) -> None:
        self._known(node)
        job = self._book.jobs.get(job_id)
        life = job.life_on(node) if job is not None else None
        if life is not None and life.released_s is None:
            life.released_s = time.time()
            self._save()

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
        """Starts one agent on each of nnodes + standby free nodes; returns the job's id. Raises RequestRefused."""
        async with self._lock:
            await self._until_settled()
            chosen = self._choose(request)
            self._book.job_counter += 1
            job_id = f"local-{self._book.job_counter}"
            log_dir = Path(request.log_dir) if request.log_dir else self._directory / "jobs" / job_id
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RequestRefused(
                    f"job not started: no logs can be written to {log_dir}: {error}", "name another one"
                ) from None
            job = LocalJob(job_id=job_id, request=request, created_s=time.time())
            job.lives = [self._new_life(job, node, log_dir, index=index) for index, node in enumerate(chosen)]
            self._book.jobs[job_id] = job
            self._save()
            try:
                for life in job.lives:
                    self._launch(job, life)
            except OSError as error:
                job.cancelled_s = 0.0
                self._save()
                raise RequestRefused(f"job {job_id} not started: {error}", "see that command and directory exist") from None
            return job_id

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
        job.cancelled_s = time.time()
        self._save()
        for life in job.lives:
            if life.ended_s is None:
                self._agents.terminate(life)

    # ---------------------------------------------------------------- faults

    async def kill(self, node: str) -> None:
        """The node loses power: SIGKILL to everything on it, without a word to anybody. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if self._is_off(marks):
                raise RequestRefused(f"node {node} is off already", self._way_up(node))
            marks.killed_s, marks.frozen_s = time.time(), None
            self._save()
            await self._kill_processes(node)

    async def freeze(self, node: str) -> None:
        """SIGSTOP to everything on the node. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if self._is_off(marks) or marks.frozen_s is not None:
                raise RequestRefused(f"node {node} is off or frozen already", self._way_up(node))
            marks.frozen_s = time.time()
            self._save()
            await self._signal_processes(node, signal.SIGSTOP)

    async def thaw(self, node: str) -> None:
        """SIGCONT to everything on a frozen node. Raises UnknownNode, RequestRefused."""
        async with self._lock:
            marks = self._marks(node)
            if marks.frozen_s is None:
                raise RequestRefused(f"node {node} is not frozen", self._way_up(node))
            marks.frozen_s = None
            self._save()
            await self._signal_processes(node, signal.SIGCONT)

    async def set_down(self, node: str, reason: str = "set down by an operator") -> None:
        """DOWN at once, and everything on it is killed. Raises UnknownNode."""
        async with self._lock:
            marks = self._marks(node)
            marks.down, marks.frozen_s = reason, None
            self._save()
            await self._kill_processes(node)

    async def come_back(self, node: str) -> str | None:
        """A node that is off boots: a new life, offered to the job that ran there if it still runs (its id is returned).

        Raises UnknownNode, RequestRefused.
        """
        async with self._lock:
            marks = self._marks(node)
            if not self._is_off(marks):
                raise RequestRefused(f"node {node} is not off, it is {self._view(self._nodes[node]).state}", self._way_up(node))
            self._reconcile()
            marks.down = marks.killed_s = marks.frozen_s = None
            self._save()
            job = self._last_job(node)
            if job is None or marks.drain is not None:
                return None
            before = job.life_on(node)
            log_dir = Path(before.log).parent if before is not None else self._directory
            life = self._new_life(job, self._nodes[node], log_dir, index=None)
            job.lives.append(life)
            self._save()
            self._launch(job, life)
            return job.job_id

    # ---------------------------------------------------------------- what is where

    def _known(self, node: str) -> LocalNode:
        if node not in self._nodes:
            raise UnknownNode(f"no node {node}; known: {', '.join(self._nodes)}", "tmctl nodes")
        return self._nodes[node]

    def _marks(self, node: str) -> NodeMarks:
        return self._book.marks_of(self._known(node).name)

    def _way_up(self, node: str) -> str:
        marks = self._book.marks_of(node)
        if self._is_off(marks):
            return f"tmctl local up {node}"
        if marks.frozen_s is not None:
            return f"tmctl local thaw {node}"
        return f"tmctl resume {node}" if marks.drain is not None else "nothing to do"

    @staticmethod
    def _is_off(marks: NodeMarks) -> bool:
        return marks.down is not None or marks.killed_s is not None

    def _unended(self) -> list[tuple[LocalJob, Life]]:
        return [(job, life) for job in self._book.jobs.values() for life in job.lives if life.ended_s is None]

    def _lives_on(self, node: str) -> list[Life]:
        return [life for _, life in self._unended() if life.node == node]

    def _last_job(self, node: str) -> LocalJob | None:
        """The running job that was on this node last."""
        jobs = [job for job in self._book.jobs.values() if job.life_on(node) and job.runs() and job.cancelled_s is None]
        return jobs[-1] if jobs else None

    def _view(self, node: LocalNode) -> NodeView:
        marks = self._book.marks_of(node.name)
        holders = [job for job in self._book.jobs.values() if self._holds(job, node.name, marks)]
        base, reason = "IDLE", marks.drain or ""
        if holders:
            base = "COMPLETING" if all(self._is_ending(job, node.name) for job in holders) else "ALLOCATED"
        flags = ["DRAIN"] if marks.drain is not None else []
        silent_since = marks.killed_s if marks.killed_s is not None else marks.frozen_s
        if marks.down is not None:
            base, reason = "DOWN", marks.down
        elif silent_since is not None and (not holders or time.time() - silent_since >= self._settings.notice_s):
            base, reason = "DOWN", "not responding"
            flags.append("NOT_RESPONDING")
        return NodeView(
            name=node.name,
            base=base,
            flags=tuple(flags),
            address=node.address,
            labels=node.labels,
            reason=reason,
            jobs=tuple(job.job_id for job in holders),
        )

    @staticmethod
    def _holds(job: LocalJob, node: str, marks: NodeMarks) -> bool:
        life = job.life_on(node)
        if life is None:
            return False
        if life.ended_s is None:
            return True
        return marks.killed_s is not None and life.released_s is None and job.runs()

    @staticmethod
    def _is_ending(job: LocalJob, node: str) -> bool:
        life = job.life_on(node)
        return job.cancelled_s is not None or (life is not None and life.released_s is not None)

    def _choose(self, request: JobRequest) -> list[LocalNode]:
        """The first free nodes. Raises RequestRefused with what stands against it."""
        wanted = request.nnodes + request.standby
        if not request.command or request.nnodes < 1 or request.standby < 0 or request.nproc_per_node < 1:
            raise RequestRefused(
                "job not started: it needs a command, at least one node and one process per node, and no negative standby count",
                "tmctl local run --nodes 2 --standby 1 -- train.py",
            )
        if request.cwd and not Path(request.cwd).is_dir():
            raise RequestRefused(f"job not started: {request.cwd} is not a directory", "run tmctl from an existing directory")
        free, busy = [], []
        for node in self._nodes.values():
            view, marks = self._view(node), self._book.marks_of(node.name)
            if view.state == "IDLE" and not self._is_off(marks) and marks.frozen_s is None:
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
        self._agents.launch(job, life, self._nodes[life.node])
        self._save()

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

    async def _until_settled(self) -> None:
        """Waits, not for ever, for nodes that are being given back: they are as good as free."""
        deadline = time.monotonic() + self._settings.release_grace_s + KILL_TIMEOUT_S
        while time.monotonic() < deadline and any(view.base == "COMPLETING" for view in await self.nodes()):
            await asyncio.sleep(self._settings.poll_s)

    async def _signal_processes(self, node: str, number: signal.Signals) -> None:
        for life in self._lives_on(node):
            await self._agents.signal_all(life, number)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            self._reconcile()

    def _reconcile(self) -> None:
        noted = [self._agents.observe(job, life) for job, life in self._unended()]
        if any(noted):
            self._save()

    def _save(self) -> None:
        self._book.save(self._path)
        self._ring()

    def _ring(self) -> None:
        """Wakes every watch."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()
