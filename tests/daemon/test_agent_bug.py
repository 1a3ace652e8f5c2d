"""A bug in the daemon that ends one agent's connection is told in full: the agent comes back, and it would end again."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.in_process import application
from tests.daemon.test_admission import hello
from tmd.daemon.loop import CoreLoop
from tmd.protocol.agent import AgentStatus
from tmd.protocol.codec import FROM_AGENT


async def test_a_bug_that_ends_a_connection_is_told_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(loop: CoreLoop, status: AgentStatus) -> None:
        raise KeyError("n1")

    monkeypatch.setattr(CoreLoop, "post_status", broken)
    async with (
        application(tmp_path, operators=frozenset({0})) as app,
        app.session.ws_connect("http://tmd/v1/agent") as socket,
    ):
        await socket.send_bytes(FROM_AGENT.encode(hello("j1")))
        await socket.send_bytes(FROM_AGENT.encode(AgentStatus(agent_id=hello("j1").agent_id, version=1, time_s=time.time())))
        while (await socket.receive(timeout=10)).type not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
            pass
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [(record.message, record.__dict__["job"]) for record in told] == [
        ("a bug ends the agent's connection: KeyError('n1')", "j1")
    ]
    assert told[0].exc_info is not None
