"""The agents' WebSocket of a real daemon: who is welcome, what is refused, what survives."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
from collections.abc import Callable

import aiohttp
import msgspec
import pytest

from tests.daemon.rig import Agent, Daemon, until
from tmd.cli.client import ClientError
from tmd.protocol.agent import AgentStatus, ProcessStatus
from tmd.protocol.codec import MAX_MESSAGE_BYTES, PROTOCOL
from tmd.protocol.rank import RankStatus

MakeAgent = Callable[..., Agent]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def test_agents_of_a_job_are_welcome_and_told_what_to_run(
    shared_daemon: Daemon, make_agent: MakeAgent, job_id: str
) -> None:
    daemon = shared_daemon
    first = await make_agent(job_id, "n1").connect(daemon)
    second = await make_agent(job_id, "n2").connect(daemon)
    other = await make_agent(f"{job_id}.other", "n3").connect(daemon)
    assert first.welcome
    assert second.welcome
    assert other.welcome
    assert (first.welcome.protocol, first.welcome.generation, len(first.welcome.job_key)) == (PROTOCOL, 1, 32)
    assert second.welcome.job_key == first.welcome.job_key
    assert other.welcome.job_key != first.welcome.job_key
    assert [spec.rank for agent in (first, second) for spec in await agent.work()] == [0, 1]
    jobs = {view["record"]["job_id"]: view for view in daemon.client.get("/v1/jobs")["jobs"]}
    assert {node["node"] for node in jobs[job_id]["nodes"]} == {"n1", "n2"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocol": (PROTOCOL[0] + 1, 0)}, "install the same tmd"),
        ({"job_id": "../up"}, "job id"),
        ({"nnodes": 0}, "nnodes"),
    ],
)
async def test_a_hello_that_cannot_be_served_is_refused_with_the_reason(
    shared_daemon: Daemon, make_agent: MakeAgent, job_id: str, changes: dict[str, object], says: str
) -> None:
    agent = await make_agent(**{"job_id": job_id, **changes}).connect(shared_daemon)
    assert says in agent.refusal
    await agent.end()
    with pytest.raises(ClientError, match="there is no job"):
        shared_daemon.client.get(f"/v1/jobs/{job_id}")


async def test_what_is_no_hello_is_refused(shared_daemon: Daemon, make_agent: MakeAgent) -> None:
    garbage = await make_agent().dial(shared_daemon)
    await garbage.send_raw(b"\xc1garbage")
    text = await make_agent().dial(shared_daemon)
    await text.send_text("hello")
    status = await make_agent().dial(shared_daemon)
    await status.say()
    for agent, says in ((garbage, "refused"), (text, "text message"), (status, "expected AgentHello")):
        await agent.end()
        assert says in agent.refusal


async def test_a_message_over_the_limit_ends_the_connection_and_nothing_else(
    shared_daemon: Daemon, make_agent: MakeAgent, job_id: str
) -> None:
    agent = await make_agent(job_id).connect(shared_daemon)
    with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # it may be closed before all is sent
        await agent.send_raw(b"\0" * (MAX_MESSAGE_BYTES + 1))
    await agent.end()
    assert (await make_agent(job_id).connect(shared_daemon)).welcome


async def test_an_agent_speaks_for_itself_and_its_own_job_only(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    agent = await make_agent(job_id, "n1").connect(shared_daemon)
    await agent.send(AgentStatus(agent_id="somebody-else", version=1, time_s=0.0))
    assert "somebody-else" in await agent.refused()

    agent = await make_agent(job_id, "n2").connect(shared_daemon)
    foreign = RankStatus(job_id="j2", incarnation="i1", version=1, rank=0)
    await agent.say(ProcessStatus(incarnation="i1", pid=1, state="running", rank=foreign))
    assert "of job j2" in await agent.refused()

    agent = await make_agent(job_id, "n3").connect(shared_daemon)
    await agent.send(agent.hello)
    assert "second hello" in await agent.refused()

    thief = await make_agent("thief", "n9", agent_id=f"agent-{job_id}-n1").connect(shared_daemon)
    assert "in use by another job" in thief.refusal


async def test_an_agent_that_connects_again_is_the_same_agent(shared_daemon: Daemon, make_agent: MakeAgent, job_id: str) -> None:
    """
    1. An agent's connection is half dead: it has noticed, the daemon has not.
    2. It connects again: the new connection counts, the old one is closed, and it is not "gone".
    """
    before = await make_agent(job_id, "n1").connect(shared_daemon)
    after = await make_agent(job_id, "n1").connect(shared_daemon)
    assert before.welcome
    assert after.welcome
    assert after.welcome.job_key == before.welcome.job_key
    await before.end()
    assert before.refusal == ""

    def connected() -> list[bool]:
        views = shared_daemon.client.get("/v1/nodes")["nodes"]
        return [use["connected"] for node in views for use in node["uses"] if use["record"]["job_id"] == job_id]

    assert connected() == [True]
    await after.leave()
    await until(lambda: connected() == [False], "the daemon sees that it is gone")


async def test_the_store_answers_over_the_socket_and_outlives_a_kill(daemon: Daemon, make_agent: MakeAgent) -> None:
    agent = await make_agent().connect(daemon)
    assert (await agent.ask_store(1, "set", key="k", value=b"v")).error == ""
    assert (await agent.ask_store(2, "add", key="n", amount=3)).number == 3
    assert "limit" in (await agent.ask_store(3, "set", key="big", value=b"x" * ((1 << 20) + 1))).error
    daemon.end(signal.SIGKILL)
    daemon.start()
    await agent.connect(daemon)
    assert (await agent.ask_store(2, "add", key="n", amount=3)).number == 3, "the repeated request is done once"
    assert (await agent.ask_store(4, "get", key="k")).value == b"v"


async def test_over_tcp_agents_need_their_jobs_token_and_nobody_else_is_known(
    make_daemon: Callable[..., Daemon], make_agent: MakeAgent
) -> None:
    port = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{port}").start()
    url = f"http://127.0.0.1:{port}"
    stranger = await make_agent("j1", "n1").connect(daemon, url=url)
    assert "no token" in stranger.refusal
    token = daemon.client.post("/v1/jobs/j1/token")["token"]
    agent = await make_agent("j1", "n1", token=token).connect(daemon, url=url)
    assert agent.welcome
    assert len(agent.welcome.job_key) == 32
    await until((daemon.state_dir / "tokens" / "j1").exists, "the token's file")
    assert (daemon.state_dir / "tokens" / "j1").read_text() == token
    other = await make_agent("j2", "n2", token=token).connect(daemon, url=url)
    assert "not for this job" in other.refusal

    remote = TcpClient(port)
    assert remote.get("/v1/health")["ok"]
    for path in ("/v1/status", "/v1/jobs", "/v1/nodes", "/v1/jobs/j1"):
        with pytest.raises(ClientError, match="a munge credential has to say who asks") as refused:
            remote.get(path)
        assert refused.value.status == 403


class TcpClient:
    """GET over TCP, errors as of tmd.cli.client."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            value: dict[str, object] = msgspec.json.decode(answer.read())
        finally:
            connection.close()
        if answer.status >= 400:
            raise ClientError(str(value["error"]), status=answer.status)
        return value
