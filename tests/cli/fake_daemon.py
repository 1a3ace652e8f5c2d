"""A daemon that gives canned answers over a real unix socket, so that tmctl is tested from its arguments to the wire and back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord
from tmd.core.views import JobView, MigrationView, NodeView, RankView

Answer = Any | Callable[[], Any]


class FakeDaemon:
    """`answers`: "GET /path" -> a JSON value, (status, JSON value), or a function that makes one of them."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake daemon")

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def _handle(self, request: web.Request) -> web.Response:
        line = f"{request.method} {request.raw_path}"
        body = await request.read()
        self.asked.append((line, msgspec.json.decode(body) if body else None))
        answer = self.answers.get(line, (404, {"error": f"nothing at {line}", "remedy": "ask for something else"}))
        value = answer() if callable(answer) else answer
        status, value = value if isinstance(value, tuple) else (200, value)
        data = value if isinstance(value, bytes) else msgspec.json.encode(value)
        return web.Response(body=data, status=status, content_type="application/json")


def plain(view: msgspec.Struct) -> Any:
    """A view as the API gives it: decoded JSON without the job key."""
    value = msgspec.json.decode(msgspec.json.encode(view))
    if isinstance(view, JobView):
        del value["record"]["job_key"]
    return value


def rank_view(incarnation: str, node: str, *, rank: int | None, phase: str, pid: int) -> RankView:
    record = RankRecord(
        job_id="local-1",
        incarnation=incarnation,
        node=node,
        agent_id=f"agent-{node}",
        local_rank=0,
        rank=rank,
        state="standby" if rank is None else "member",
    )
    return RankView(
        record=record,
        phase=phase,
        process="running",
        pid=pid,
        host="127.0.0.11",
        port=4000,
        connected=True,
        last_heard_s=1_000_000_000.0,
        run_epoch=3,
        next_step=41,
        sentence="in step 41" if rank is not None else "",
    )


def migration_view(state: Any = "done", **changes: Any) -> MigrationView:
    fields: dict[str, Any] = {
        "migration_id": "m1",
        "job_id": "local-1",
        "kind": "planned",
        "state": state,
        "leavers": {1: "local-1.2"},
        "joiners": {1: "local-1.5"},
        "from_nodes": ("n2",),
        "to_nodes": ("n5",),
        "trigger": "drain of n2: fan",
    }
    return MigrationView(record=MigrationRecord(**(fields | changes)), sentence="waiting for n5 to stage its links")


DONE: dict[str, Any] = {
    "phases_s": {"detect": 0.0011, "select": 0.002, "prepare": 0.31, "install": 0.014, "copy": 0.052, "first_step": 0.12},
    "downtime_s": 0.0612,
    "downtime_steps": 0.4,
    "lost_time_s": 0.51,
    "normal_step_s": 0.15,
}

COST: dict[str, Any] = {
    "pause_s": 0.0612,
    "slowdown_s": 0.4488,
    "lost_time_s": 0.51,
    "lost_rank_s": 2.04,
    "steps_redone": 1,
    "bytes_by_transport": {"tcp": 4096},
    "bytes_by_source": {"rank 1 on n2": 4096},
}
UNKNOWN_COST: dict[str, Any] = {
    **dict.fromkeys(("pause_s", "slowdown_s", "lost_time_s", "lost_rank_s")),
    "steps_redone": 0,
    "bytes_by_transport": {},
    "bytes_by_source": {},
}
JOB_COST: dict[str, Any] = {
    "job_id": "local-1",
    "world_size": 4,
    "migrations": [
        {"migration_id": "m1", "kind": "planned", "state": "done", "started_s": 1.0, "cost": COST},
        {"migration_id": "m2", "kind": "planned", "state": "aborted", "started_s": 2.0, "cost": UNKNOWN_COST},
    ],
    "total": COST,
    "unmeasured": 1,
}

RANK = rank_view("local-1.2", "n2", rank=1, phase="running", pid=4711)
STANDBY = rank_view("local-1.5", "n5", rank=None, phase="ready", pid=4712)
NODE = NodeRecord(node="n2", job_id="local-1", state="draining", use="training", labels={"rack": "r1"}, reason="fan")
FORMER = NodeRecord(node="n2", job_id="local-0", state="up", use="released")
JOB = JobView(
    record=JobRecord(
        job_id="local-1",
        state="running",
        nnodes=4,
        nproc_per_node=1,
        world_size=4,
        owner_uid=1000,
        job_key=b"secret",
        epoch=3,
        command=("script", "train.py", "--steps", "60"),
    ),
    ranks=(RANK,),
    standbys=(STANDBY,),
    nodes=(NODE,),
    migrations=(migration_view("installing"),),
    next_step=41,
    normal_step_s=0.1512,
    last_commit_s=1_000_000_000.0,
    sentence="training, step 41",
)
NODES = {
    "nodes": [
        {
            "name": "n2",
            "state": "draining",
            "manager_state": "ALLOCATED+DRAIN",
            "address": "127.0.0.12",
            "labels": {"rack": "r1", "zone": "z1"},
            "reason": "fan",
            "uses": [
                plain(NodeView(record=FORMER, state="draining", sentence="not of interest any more")),
                plain(NodeView(record=NODE, state="draining", ranks=(1,), sentence="rank 1 moves to n5")),
            ],
        },
        {
            "name": "n6",
            "state": "up",
            "manager_state": "IDLE",
            "address": "127.0.0.16",
            "labels": {"rack": "r3"},
            "reason": "",
            "uses": [],
        },
    ],
    "manager_error": "",
}
STATUS = {
    "tmd_version": "0.1.0",
    "protocol": [1, 0],
    "generation": 3,
    "pid": 99,
    "started_s": 1000.0,
    "now_s": 8200.0,
    "paused": False,
    "observe_only": False,
    "resource_manager": "local",
    "agents": 6,
    "jobs": {"running": 1},
    "sentences": {"local-1": "training, step 41", "m1": "waiting for n5 to stage its links"},
    "now": [
        {"job": "local-10", "kind": "job", "object": "local-10", "sentence": "rank 0 builds: no step yet"},
        {"job": "local-1", "kind": "node", "object": "n10", "sentence": "holds standbys"},
        {"job": "local-1", "kind": "node", "object": "n2", "sentence": "trains rank 1"},
        {"job": "local-1", "kind": "migration", "object": "m1", "sentence": "waiting for n5 to stage its links"},
        {"job": "local-1", "kind": "job", "object": "local-1", "sentence": "training, step 41"},
    ],
    "ledger": {
        "url": "sqlite:///ledger.db",
        "healthy": True,
        "error": "",
        "failing_since_s": None,
        "writes": 120,
        "write_median_s": 0.0018,
        "write_max_s": 0.0123,
    },
}


def event(event_id: int, cause: int, time_s: float, subject: str, kind: str, text: str) -> Any:
    return plain(
        EventRecord(event_id=event_id, cause=cause, time_s=time_s, job_id="local-1", subject=subject, kind=kind, text=text)
    )
