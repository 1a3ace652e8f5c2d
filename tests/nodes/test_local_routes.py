"""The routes of a local cluster over a real unix socket, asked by tmctl's own client."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.nodes.stand_ins import PADDING, STAND_IN, full_disk, until
from tmd.api.context import say_errors
from tmd.cli.client import Client, ClientError
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_routes import local_routes


class Api:
    """Asks from another thread, while this one serves."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def get(self, target: str) -> Any:
        return await asyncio.to_thread(self._client.get, f"/v1/local{target}")

    async def post(self, target: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self._client.post, f"/v1/local{target}", body)


async def serve(cluster: LocalCluster, socket: Path, **options: Any) -> web.AppRunner:
    app = web.Application(middlewares=[say_errors])
    app.add_routes(local_routes(cluster, **options))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    return runner


def log_of(cluster: LocalCluster, job_id: str) -> list[str]:
    return Path(cluster.job(job_id).lives[0].log).read_text().splitlines()


@pytest.fixture
async def socket() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tmd-nodes-") as folder:
        yield Path(folder) / "tmd.sock"


@pytest.fixture
async def api(cluster: LocalCluster, socket: Path) -> AsyncIterator[Api]:
    runner = await serve(cluster, socket)
    yield Api(Client(socket))
    await runner.cleanup()


async def test_a_job_is_started_shown_and_cancelled(api: Api, cluster: LocalCluster) -> None:
    job = await api.post("/jobs", {"command": [STAND_IN], "nnodes": 2, "standby": 1})
    assert (job["job_id"], job["nnodes"], job["standby"]) == ("local-1", 2, 1)
    assert [(agent["node"], agent["life"], agent["running"]) for agent in job["agents"]] == [
        ("n1", 1, True),
        ("n2", 1, True),
        ("n3", 1, True),
    ]
    assert all(agent["pid"] > 0 for agent in job["agents"])
    await api.post("/jobs/local-1/cancel")
    await until(lambda: not cluster.job("local-1").runs(), "job ended")
    assert {agent["running"] for agent in (await api.get("/jobs/local-1"))["agents"]} == {False}


async def test_nodes_suffer_what_they_should(api: Api) -> None:
    await api.post("/jobs", {"command": [STAND_IN], "nnodes": 2})
    for action, state in (("freeze", "ALLOCATED"), ("thaw", "ALLOCATED"), ("kill", "ALLOCATED"), ("up", "ALLOCATED")):
        assert (await api.post(f"/nodes/n1/{action}"))["state"] == state
    seen = await api.post("/nodes/n1/down", {"reason": "smoke"})
    assert seen == {"node": "n1", "state": "DOWN", "address": "127.0.0.11", "reason": "smoke", "jobs": []}


@pytest.mark.parametrize(
    ("target", "body", "status", "error"),
    [
        ("/nodes/n9/kill", {}, 404, "no node n9; known: n1, n2, n3, n4"),
        ("/nodes/n1/thaw", {}, 409, "node n1 is not frozen"),
        ("/nodes/n1/explode", {}, 404, "Not Found"),
        ("/nodes/n1/down", {"raeson": "smoke"}, 400, "raeson"),
        ("/jobs/local-7/cancel", {}, 404, "no local job local-7; known: none"),
        ("/jobs", {"command": ["true"], "nnodes": 9}, 409, "9 nodes wanted"),
        ("/jobs", {"command": "true"}, 400, "command"),
    ],
)
async def test_what_cannot_be_done_is_said(api: Api, target: str, body: Any, status: int, error: str) -> None:
    with pytest.raises(ClientError) as refusal:
        await api.post(target, body)
    assert refusal.value.status == status
    assert error in str(refusal.value)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"command": ["x\0y"]}, r"command[0] 'x\x00y' has a NUL"),
        ({"command": []}, "needs a command"),
        ({"nnodes": 0}, "at least one node"),
        ({"env": {"A": "\0"}}, "environment variable 'A' has a NUL"),
        ({"env": {"a=b": "c"}}, "'a=b' is no name for an environment variable"),
        ({"env": {"": "c"}}, "'' is no name for an environment variable"),
        ({"env": {"LONG": "x" * (128 << 10)}}, "environment variable 'LONG' is longer than 131071 bytes"),
        ({"command": ["x", "y" * (128 << 10)]}, "command[1] 'yyy"),
        ({"log_dir": "logs\0"}, "log_dir"),
        ({"cwd": "/tmp\0"}, "cwd"),
        ({"env": {f"V{index}": "x" * 100_000 for index in range(50)}}, "the request is larger than 4096 KiB"),
    ],
)
async def test_what_can_be_no_job_is_named_and_leaves_nothing(api: Api, cluster: LocalCluster, wrong: Any, named: str) -> None:
    with pytest.raises(ClientError) as refusal:
        await api.post("/jobs", {"command": [STAND_IN], **wrong})
    assert refusal.value.status == 400
    assert named in str(refusal.value)
    assert refusal.value.remedy
    assert cluster.jobs() == []


async def test_a_large_environment_arrives_whole(api: Api, cluster: LocalCluster) -> None:
    variables = {f"V{index}": "x" * 100_000 for index in range(6)}
    await api.post("/jobs", {"command": ["env"], "env": {"PATH": os.environ["PATH"], **variables}})
    await until(lambda: not cluster.job("local-1").runs(), "job ended")
    seen = {line for line in log_of(cluster, "local-1") if line.startswith("V")}
    assert seen == {f"{name}={value}" for name, value in variables.items()}


async def test_what_cannot_be_written_is_the_daemons_trouble(api: Api, cluster: LocalCluster) -> None:
    await api.post("/jobs", {"command": [STAND_IN], "env": PADDING})
    with full_disk(), pytest.raises(ClientError, match=r"node n2 is not killed: .*cluster\.json") as refusal:
        await api.post("/nodes/n2/kill")
    assert (refusal.value.status, refusal.value.remedy) == (503, "free space there or repair that disk, then ask again")
    assert (await api.post("/nodes/n2/kill"))["state"] == "DOWN+NOT_RESPONDING"


@pytest.mark.parametrize("uid", [None, 54321])
async def test_only_the_daemons_own_user_and_root_may_run_code(cluster: LocalCluster, socket: Path, uid: int | None) -> None:
    runner = await serve(cluster, socket, caller_uid=lambda _: uid)
    try:
        with pytest.raises(ClientError, match="may not touch them") as refusal:
            await Api(Client(socket)).post("/jobs", {"command": [STAND_IN]})
    finally:
        await runner.cleanup()
    assert refusal.value.status == 403
    assert cluster.jobs() == []
