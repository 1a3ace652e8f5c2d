"""The API of a real daemon: answers in the documented shape, errors that say what to do."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon.rig import Agent, Daemon, until
from tmd.cli.client import ClientError

MakeAgent = Callable[..., Agent]


@pytest.fixture(scope="module")
def job_daemon(shared_daemon: Daemon) -> Daemon:
    """With a job j1 of two nodes, for the tests that change nothing."""

    async def make_job() -> None:
        agents = [await Agent("j1", node).connect(shared_daemon) for node in ("n1", "n2")]
        for agent in agents:
            await agent.leave()

    asyncio.run(make_job())
    return shared_daemon


async def running_job(daemon: Daemon, make_agent: MakeAgent, job_id: str, *, standbys: int = 0) -> list[Agent]:
    """Two nodes that train and some standby nodes, every process wanted of them running."""
    agents = [await make_agent(job_id, f"{job_id}-n{number + 1}").connect(daemon) for number in range(2 + standbys)]
    for agent in agents:
        await agent.work()
        await agent.run_what_is_wanted()
    return agents


def refused(daemon: Daemon, method: str, path: str, body: Any = None) -> ClientError:
    with pytest.raises(ClientError) as error:
        daemon.client.get(path) if method == "GET" else daemon.client.post(path, body)
    return error.value


async def test_the_views_are_those_that_the_interface_promises(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    daemon = shared_daemon
    await running_job(daemon, make_agent, job_id, standbys=1)
    status = daemon.status()
    assert (status["generation"], status["pid"], status["paused"]) == (1, daemon.pid, False)
    assert status["ledger"]["healthy"]
    assert status["ledger"]["writes"] > 0
    assert 0 < status["ledger"]["write_median_s"] <= status["ledger"]["write_max_s"]
    assert sum(status["jobs"].values()) == len(daemon.client.get("/v1/jobs")["jobs"])
    assert job_id in status["sentences"]
    now = {(each["kind"], each["object"]) for each in status["now"] if each["job"] == job_id}
    assert now >= {("job", job_id), ("node", f"{job_id}-n1"), ("node", f"{job_id}-n2"), ("node", f"{job_id}-n3")}
    job = daemon.client.get(f"/v1/jobs/{job_id}")
    assert (job["record"]["nnodes"], job["record"]["world_size"]) == (2, 2)
    assert [rank["record"]["rank"] for rank in job["ranks"]] == [0, 1]
    nodes = daemon.client.get("/v1/nodes")
    own = [node for node in nodes["nodes"] if node["name"].startswith(job_id)]
    assert ([node["name"] for node in own], nodes["manager_error"]) == ([f"{job_id}-n{number}" for number in (1, 2, 3)], "")
    assert own[0]["uses"][0]["record"]["job_id"] == job_id
    standbys = daemon.client.get("/v1/standbys")["standbys"]
    assert [each["record"]["node"] for each in standbys if each["record"]["job_id"] == job_id] == [f"{job_id}-n3"]
    assert daemon.client.get(f"/v1/migrations?job={job_id}") == {"migrations": []}
    story = daemon.client.get(f"/v1/story/{job_id}")
    assert story["subject"] == job_id
    assert story["events"]
    assert [event["event_id"] for event in story["events"]] == sorted(event["event_id"] for event in story["events"])


async def test_the_job_key_is_never_shown(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    agents = await running_job(shared_daemon, make_agent, job_id)
    assert agents[0].welcome is not None
    key = agents[0].welcome.job_key
    for path in ("/v1/status", "/v1/jobs", f"/v1/jobs/{job_id}", "/v1/nodes", f"/v1/story/{job_id}"):
        answer = json.dumps(shared_daemon.client.get(path))
        assert '"job_key"' not in answer
        for shown in (key.hex(), base64.b64encode(key).decode()):
            assert shown not in answer
            assert shown not in shared_daemon.log_text()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/v1/jobs/nobody", None, 404, "there is no job nobody"),
        ("GET", "/v1/migrations/m999", None, 404, "there is no migration m999"),
        ("GET", "/v1/migrations?job=nobody", None, 404, "no job nobody"),
        ("GET", "/v1/migrations/m999?wait=soon", None, 400, "wait=soon"),
        ("GET", "/v1/story/nobody", None, 404, "nothing is recorded about nobody"),
        ("GET", "/v1/nonsense", None, 404, "/v1/nonsense"),
        ("GET", "/v1/local/jobs/local-1", None, 404, "this daemon has no local nodes (resource_manager = none)"),
        ("POST", "/v1/status", {}, 405, "/v1/status"),
        ("POST", "/v1/migrations", {"job": "nobody", "rank": 0}, 404, "there is no job nobody"),
        ("POST", "/v1/migrations", {"job": "j1"}, 400, "either a node or a rank"),
        ("POST", "/v1/migrations", {"job": "j1", "rank": 0, "node": "n1"}, 400, "either a node or a rank"),
        ("POST", "/v1/migrations", {"job": "j1", "rank": "zero"}, 400, "Expected `int | null`"),
        ("POST", "/v1/migrations", {"job": "j1", "rang": 0}, 400, "unknown field `rang`"),
        ("POST", "/v1/migrations", {"job": "j1", "rank": 7}, 404, "no rank 7"),
        ("POST", "/v1/migrations", {"job": "j1", "node": "n9"}, 404, "no node n9"),
        ("POST", "/v1/migrations", {"job": "j1", "rank": 0, "to_node": "n9"}, 404, "no node n9"),
        ("POST", "/v1/migrations/m999/abort", {}, 404, "there is no migration"),
        ("POST", "/v1/jobs/nobody/cancel", {}, 404, "there is no job"),
        ("POST", "/v1/jobs/-x/token", {}, 400, "job id"),
        ("POST", "/v1/nodes/n9/drain", {"reason": "x"}, 404, "no job has a node n9"),
        ("POST", "/v1/nodes/n1/drain", {"reason": " "}, 400, "needs a reason"),
        ("POST", "/v1/nodes/n1/drain", {}, 400, "reason"),
        ("POST", "/v1/nodes/n9/resume", {}, 404, "no job has a node n9"),
    ],
)
async def test_errors_have_their_status_and_say_what_is_wrong(
    job_daemon: Daemon, method: str, path: str, body: Any, status: int, says: str
) -> None:
    error = refused(job_daemon, method, path, body)
    assert (error.status, says in str(error)) == (status, True), str(error)


def test_a_body_that_is_no_json_is_a_400(job_daemon: Daemon) -> None:
    connection = http.client.HTTPConnection("tmd", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(job_daemon.socket))
    connection.request("POST", "/v1/migrations", b"{not json")
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == 400
    assert "job" in body["remedy"]


async def test_a_migration_that_the_core_refuses_is_a_409_with_its_reason(
    shared_daemon: Daemon, make_agent: MakeAgent, job_id: str
) -> None:
    await running_job(shared_daemon, make_agent, job_id)
    for body in ({"job": job_id, "rank": 0}, {"job": job_id, "node": f"{job_id}-n1", "dry_run": True}):
        error = refused(shared_daemon, "POST", "/v1/migrations", body)
        assert error.status == 409
        assert str(error)


async def test_pause_is_remembered_by_the_next_daemon(daemon: Daemon) -> None:
    assert daemon.client.post("/v1/pause") == {"paused": True}
    assert daemon.end() == 0
    daemon.start("--observe-only")
    assert daemon.status()["paused"]
    assert daemon.status()["observe_only"]
    assert daemon.client.post("/v1/unpause") == {"paused": False}
    assert not daemon.status()["paused"]


async def test_a_drain_reaches_the_core_and_a_resume_ends_it(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    daemon, drained = shared_daemon, f"{job_id}-n1"
    await running_job(daemon, make_agent, job_id)

    def use() -> Any:
        return next(node for node in daemon.client.get("/v1/nodes")["nodes"] if node["name"] == drained)

    answer = daemon.client.post(f"/v1/nodes/{drained}/drain", {"reason": "bad DIMM"})
    assert answer == {"node": drained, "state": "draining"}
    await until(lambda: use()["uses"][0]["state"] == "draining", "the core knows of the drain")
    assert "bad DIMM" in use()["reason"]
    assert daemon.client.post(f"/v1/nodes/{drained}/resume") == {"node": drained, "state": "up"}
    await until(lambda: use()["uses"][0]["state"] == "up", "the core knows that it ended")


async def test_a_cancelled_job_ends_and_its_agents_are_told(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    daemon = shared_daemon
    agents = await running_job(daemon, make_agent, job_id)
    token = daemon.state_dir / "tokens" / job_id
    assert token.exists()
    daemon.client.post(f"/v1/jobs/{job_id}/cancel")
    for agent in agents:
        await agent.job_over()
    assert daemon.client.get(f"/v1/jobs/{job_id}")["record"]["state"] == "failed"
    assert not token.exists()
    assert refused(daemon, "POST", f"/v1/jobs/{job_id}/cancel").status == 409
    told = [line for line in daemon.log_lines() if line.get("job") == job_id and "event" in line]
    assert any("cancelled by" in line["msg"] for line in told)
