"""One run of the example on the local cluster, with what is done to it on the way."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tmd.demo.losses import RunResult, read_run
from tmd.demo.stack import Stack, StackError

POLL_S = 0.2
#: An agent starts a Python interpreter and connects; on a busy machine that takes seconds.
AGENTS_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Disturbance:
    """At this step (or later, as soon as it is seen): drain the node of `rank`, or kill everything on it at once."""

    at_step: int
    kind: Literal["drain", "kill"]
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What is run: `nodes` train with one rank each, `standbys` more wait."""

    nodes: int
    standbys: int
    steps: int
    script: Path
    arguments: tuple[str, ...] = ()
    timeout_s: float = 900.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A finished run with what the daemon recorded of it."""

    result: RunResult
    migrations: tuple[dict[str, Any], ...]
    killed_ranks: frozenset[int]
    #: Ranks whose process is not the one that started, beside those that were drained or killed.
    stayers_restarted: int
    approximations: tuple[str, ...]


class RunFailed(RuntimeError):
    """The job did not end well; the text has the daemon's reason and where the logs are."""


def run(stack: Stack, shape: Shape, out: Path, disturbances: tuple[Disturbance, ...], say: Callable[[str], None]) -> Run:
    """Runs the job to its end. Raises RunFailed."""
    out.mkdir(parents=True, exist_ok=True)
    job_id = stack.submit(
        nnodes=shape.nodes,
        standby=shape.standbys,
        nproc_per_node=1,
        command=[str(shape.script), "--steps", str(shape.steps), "--out", str(out), *shape.arguments],
        cwd=str(Path.cwd()),
        log_dir=str(out / "logs"),
    )
    try:
        return _Watch(stack, shape, job_id, disturbances, say).until_end(out)
    except StackError as error:
        raise RunFailed(str(error)) from None


class _Watch:
    def __init__(
        self, stack: Stack, shape: Shape, job_id: str, disturbances: tuple[Disturbance, ...], say: Callable[[str], None]
    ) -> None:
        self._stack, self._shape, self._job_id, self._say = stack, shape, job_id, say
        self._pending = sorted(disturbances, key=lambda each: each.at_step)
        self._touched: set[int] = set()
        self._killed: set[int] = set()
        self._first_pids: dict[int, int] = {}
        self._last_pids: dict[int, int] = {}
        self._said: dict[str, str] = {}
        self._open: set[str] = set()
        self._started = time.monotonic()

    def until_end(self, out: Path) -> Run:
        deadline = time.monotonic() + self._shape.timeout_s
        while True:
            view = self._stack.job(self._job_id)
            if view is None:
                self._wait_for_agents(out)
                continue
            record = view["record"]
            self._observe(view)
            if record["state"] == "done":
                break
            if record["state"] == "failed":
                raise RunFailed(f"job {self._job_id} failed: {record['reason']}\nlogs: {out}")
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"job {self._job_id} not finished after {self._shape.timeout_s:.0f} s: {view['sentence']}\nlogs: {out}"
                )
            if self._pending and view["next_step"] >= self._pending[0].at_step and record["state"] == "running":
                self._disturb(view, self._pending.pop(0))
            time.sleep(POLL_S)
        self._tell_ended()
        self._wait_until_gone(out)
        if self._pending:
            raise RunFailed(
                f"job {self._job_id} ended before step {self._pending[0].at_step}: nothing was tested; use more steps"
            )
        changed = {rank for rank, pid in self._last_pids.items() if self._first_pids[rank] != pid}
        return Run(
            result=read_run(out, self._shape.nodes),
            migrations=tuple(self._migrations()),
            killed_ranks=frozenset(self._killed),
            stayers_restarted=len(changed - self._touched),
            approximations=tuple(record["approximations"]),
        )

    def _wait_for_agents(self, out: Path) -> None:
        """The daemon knows a job from its first agent on. Raises RunFailed if none has come in time, or all have ended."""
        if time.monotonic() - self._started > AGENTS_TIMEOUT_S or not any(agent["running"] for agent in self._agents()):
            raise RunFailed(f"no agent of job {self._job_id} has reached the daemon; logs: {out / 'logs'}")
        time.sleep(POLL_S)

    def _wait_until_gone(self, out: Path) -> None:
        """Its nodes are free for the next run once every agent has ended. Raises RunFailed."""
        deadline = time.monotonic() + AGENTS_TIMEOUT_S
        while left := [agent["node"] for agent in self._agents() if agent["running"]]:
            if time.monotonic() > deadline:
                raise RunFailed(f"job {self._job_id} is done, but agents still run on {', '.join(left)}; logs: {out / 'logs'}")
            time.sleep(POLL_S)

    def _agents(self) -> list[dict[str, Any]]:
        agents: list[dict[str, Any]] = self._stack.client.get(f"/v1/local/jobs/{self._job_id}")["agents"]
        return agents

    def _migrations(self) -> list[dict[str, Any]]:
        found = self._stack.client.get(f"/v1/migrations?job={self._job_id}")["migrations"]
        return sorted((each["record"] for each in found), key=lambda record: record["started_s"])

    def _disturb(self, view: dict[str, Any], what: Disturbance) -> None:
        node = next(each["record"]["node"] for each in view["ranks"] if each["record"]["rank"] == what.rank)
        self._touched.add(what.rank)
        if what.kind == "drain":
            self._say(f"step {view['next_step']}: tmctl drain {node} (rank {what.rank})")
            self._stack.client.post(f"/v1/nodes/{node}/drain", {"reason": "demo: this rack is emptied"})
        else:
            self._killed.add(what.rank)
            self._say(f"step {view['next_step']}: SIGKILL of everything on {node} (rank {what.rank})")
            self._stack.client.post(f"/v1/local/nodes/{node}/kill", {})

    def _observe(self, view: dict[str, Any]) -> None:
        for each in view["ranks"]:
            rank, pid = each["record"]["rank"], each["pid"]
            if pid:
                self._first_pids.setdefault(rank, pid)
                self._last_pids[rank] = pid
        self._tell("job", f"step {view['next_step']}/{self._shape.steps}, epoch {view['record']['epoch']}: {view['sentence']}")
        under_way = {each["record"]["migration_id"]: each["sentence"] for each in view["migrations"]}
        for migration_id, sentence in under_way.items():
            self._tell(migration_id, f"{migration_id}: {sentence}")
        if self._open - under_way.keys():
            self._tell_ended()
        self._open = set(under_way)

    def _tell_ended(self) -> None:
        for record in self._migrations():
            if record["ended_s"] is not None:
                self._tell(record["migration_id"], f"{record['migration_id']}: {record['state']}: {record['reason']}")

    def _tell(self, key: str, line: str) -> None:
        """On a terminal the job's line is rewritten in place; elsewhere a line is said when more than the step changed."""
        if key == "job":
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[2K{line[:160]}")
                sys.stderr.flush()
            return
        if self._said.get(key) != line:
            self._said[key] = line
            self._say(line)
