"""Who may see and do what over the unix socket, and what waits for how long."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.daemon import records
from tests.daemon.in_process import Application, application
from tmd.core.instructions import Persist
from tmd.daemon import agents as agents_module
from tmd.daemon.identity import operator_uids, peer_uid
from tmd.ledger.ledger import Ledger
from tmd.protocol.agent import AgentRefused
from tmd.protocol.codec import TO_AGENT

OWNER, STRANGER, OPERATOR = 1000, 1001, 1002


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Application]:
    """Two jobs that have ended, of two users, each with a migration and events."""
    ledger = await Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    await ledger.write(
        Persist(
            jobs=(
                records.job("own", owner_uid=OWNER, state="done", plan=None),
                records.job("other", owner_uid=STRANGER, state="done", plan=None),
            ),
            migrations=tuple(records.migration(migration_id=f"m-{job}", job_id=job, state="done") for job in ("own", "other")),
            events=(records.event(1, subject="m-own", job_id="own"), records.event(2, subject="m-other", job_id="other")),
        )
    )
    await ledger.close()
    async with application(tmp_path, operators=operator_uids([str(OPERATOR)])) as running:
        yield running


SEEING = [
    ("GET", "/v1/jobs/{job}"),
    ("GET", "/v1/jobs/{job}/cost"),
    ("GET", "/v1/migrations/m-{job}"),
    ("GET", "/v1/migrations?job={job}"),
]
ACTING: list[tuple[str, str, Any]] = [
    ("POST", "/v1/jobs/{job}/cancel", {}),
    ("POST", "/v1/migrations/m-{job}/abort", {}),
    ("POST", "/v1/migrations", "rank 0"),
    ("POST", "/v1/jobs/{job}/token", {}),
]
FOR_OPERATORS = ["/v1/pause", "/v1/unpause", "/v1/nodes/n1/drain", "/v1/nodes/n1/resume"]


@pytest.mark.parametrize("uid", [0, os.geteuid(), OPERATOR, OWNER])
async def test_owner_and_operators_see_the_job(app: Application, uid: int) -> None:
    app.uid = uid
    for method, path in SEEING:
        assert (await app.ask(method, path.format(job="own")))[0] == 200, path
    status, story = await app.ask("GET", "/v1/story/m-own")
    assert (status, [event["subject"] for event in story["events"]]) == (200, ["m-own"])


async def test_another_user_sees_and_does_nothing_of_it(app: Application) -> None:
    app.uid = OWNER
    for method, path in SEEING:
        assert (await app.ask(method, path.format(job="other")))[0] == 403, path
    for method, path, body in ACTING:
        wanted = {"job": "other", "rank": 0} if body == "rank 0" else body
        status, answer = await app.ask(method, path.format(job="other"), wanted)
        assert status == 403, path
        assert "not yours" in answer["error"]
        assert answer["remedy"]
    assert (await app.ask("GET", "/v1/story/m-other"))[0] == 404
    assert [job["record"]["job_id"] for job in (await app.ask("GET", "/v1/jobs"))[1]["jobs"]] == ["own"]
    listed = (await app.ask("GET", "/v1/migrations"))[1]["migrations"]
    assert [each["record"]["migration_id"] for each in listed] == ["m-own"]
    assert (await app.ask("GET", "/v1/status"))[1]["jobs"] == {"done": 1}


async def test_what_concerns_all_jobs_is_for_operators(app: Application) -> None:
    app.uid = OWNER
    for path in FOR_OPERATORS:
        status, answer = await app.ask("POST", path, {"reason": "x"} if path.endswith("drain") else {})
        assert (status, "is for operators" in answer["error"]) == (403, True), path
    app.uid = OPERATOR
    assert await app.ask("POST", "/v1/pause") == (200, {"paused": True})
    assert await app.ask("POST", "/v1/unpause") == (200, {"paused": False})
    assert (await app.ask("POST", "/v1/nodes/n1/drain", {"reason": "x"}))[0] == 404


async def test_who_cannot_be_known_may_do_nothing(app: Application) -> None:
    app.uid = None
    for path in ("/v1/status", "/v1/jobs", "/v1/jobs/own", "/v1/nodes", "/v1/standbys", "/v1/migrations", "/v1/story/own"):
        assert (await app.ask("GET", path))[0] == 403, path


async def test_acting_on_what_has_ended_is_a_conflict(app: Application) -> None:
    app.uid = OWNER
    for method, path, body in ACTING[:3]:
        wanted = {"job": "own", "rank": 0} if body == "rank 0" else body
        status, answer = await app.ask(method, path.format(job="own"), wanted)
        assert (status, bool(answer["error"])) == (409, True), path


async def test_a_long_poll_answers_at_once_for_what_has_ended(app: Application) -> None:
    began = time.monotonic()
    status, view = await app.ask("GET", "/v1/migrations/m-own?wait=30")
    assert (status, view["record"]["state"]) == (200, "done")
    assert time.monotonic() - began < 5


async def test_a_long_poll_ends_with_the_migration_or_the_time(app: Application) -> None:
    await app.ledger.write(Persist(migrations=(records.migration(migration_id="m-late", job_id="own"),)))
    status, view = await app.ask("GET", "/v1/migrations/m-late?wait=0.05")
    assert (status, view["record"]["state"]) == (200, "preparing")
    waiting = asyncio.create_task(app.ask("GET", "/v1/migrations/m-late?wait=30"))
    ended = records.migration(migration_id="m-late", job_id="own", state="aborted")
    await app.ledger.write(Persist(migrations=(ended,)))
    app.changes.ring()
    status, view = await asyncio.wait_for(waiting, 10)
    assert (status, view["record"]["state"]) == (200, "aborted")


async def test_an_agent_that_says_nothing_is_sent_away(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "HELLO_TIMEOUT_S", 0.05)
    async with app.session.ws_connect("http://tmd/v1/agent") as silent:
        message = await asyncio.wait_for(silent.receive(), 10)
        refusal = TO_AGENT.decode(message.data)
        assert isinstance(refusal, AgentRefused)
        assert "no hello within" in refusal.reason
        assert (await silent.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_a_daemon_with_too_much_to_do_asks_agents_to_come_back(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.daemon.loop.BACKLOG_LIMIT", -1)
    with pytest.raises(aiohttp.WSServerHandshakeError) as busy:
        await app.session.ws_connect("http://tmd/v1/agent")
    assert busy.value.status == 503


async def test_the_kernel_says_who_is_at_the_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    async def look(request: web.Request) -> web.Response:
        seen.append(peer_uid(request))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", look)
    runner = web.AppRunner(app)
    await runner.setup()
    monkeypatch.chdir(tmp_path)
    await web.UnixSite(runner, "s").start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector("s")) as session, session.get("http://x/"):
        pass
    await runner.cleanup()
    assert seen == [os.geteuid()]
