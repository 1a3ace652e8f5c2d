"""The daemon's life: started, killed, stopped, started again, started twice, started without a disk."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.postgres import Postgres
from tests.daemon.rig import DEADLINE_S, ROOT, Agent, Daemon, until
from tmd.cli.client import ClientError
from tmd.config import load
from tmd.daemon import service
from tmd.daemon.identity import UnknownUser
from tmd.daemon.notify import Notifier
from tmd.daemon.service import CannotStart
from tmd.ledger.engine import BadDatabaseUrl
from tmd.ledger.errors import LedgerUnavailable

MakeDaemon = Callable[..., Daemon]
MakeAgent = Callable[..., Agent]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected to end by itself."""
    command = [sys.executable, "-m", "tmd.daemon.main", "serve", "--resource-manager", "none", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)


async def test_after_kill_9_everything_is_there_and_the_generation_has_risen(
    make_daemon: MakeDaemon, make_agent: MakeAgent, database_url: str
) -> None:
    daemon = make_daemon("--database", database_url).start()
    agents = [await make_agent("j1", node).connect(daemon) for node in ("n1", "n2", "n3")]
    wanted = [await agent.work() for agent in agents]
    keys = {agent.welcome.job_key for agent in agents if agent.welcome}
    before = daemon.client.get("/v1/jobs/j1")
    events = daemon.client.get("/v1/story/j1")["events"]

    daemon.end(signal.SIGKILL)
    daemon.start()
    assert daemon.status()["generation"] == 2
    after = daemon.client.get("/v1/jobs/j1")
    assert {key: after["record"][key] for key in ("job_id", "state", "world_size", "command", "incarnation_counter")} == {
        key: before["record"][key] for key in ("job_id", "state", "world_size", "command", "incarnation_counter")
    }
    assert [rank["record"]["incarnation"] for rank in after["ranks"]] == [
        rank["record"]["incarnation"] for rank in before["ranks"]
    ]
    assert daemon.client.get("/v1/story/j1")["events"][: len(events)] == events
    for agent in agents:
        agent.directives.clear()
        await agent.connect(daemon)
    assert [await agent.work() for agent in agents] == wanted
    assert {agent.welcome.job_key for agent in agents if agent.welcome} == keys
    assert {agent.welcome.generation for agent in agents if agent.welcome} == {2}


async def test_a_stop_is_clean_and_agents_may_come_back(daemon: Daemon, make_agent: MakeAgent) -> None:
    agent = await make_agent().connect(daemon)
    assert await asyncio.to_thread(daemon.end, signal.SIGTERM) == 0
    await agent.end()
    assert agent.refusal == "", "a stop is no refusal"
    assert not daemon.socket.exists()
    daemon.start()
    assert (await agent.connect(daemon)).welcome


async def test_nothing_is_done_while_the_ledger_cannot_be_written(make_daemon: MakeDaemon, make_agent: MakeAgent) -> None:
    """
    1. Somebody holds a lock on the database.
    2. A job's first agent says hello: it is not welcomed, for that could be forgotten. The daemon says loudly what is wrong,
       and its health is bad.
    3. The lock goes away: the agent is welcomed.
    """
    daemon = make_daemon()
    ledger = daemon.state_dir / "ledger.db"
    daemon.start("--database", f"sqlite:///{ledger}?timeout=0.05")
    other = sqlite3.connect(ledger, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    agent = await make_agent().dial(daemon)
    await agent.send(agent.hello)
    await until(lambda: not daemon.status()["ledger"]["healthy"], "the daemon says that it cannot write")
    with pytest.raises(ClientError) as unwell:
        daemon.client.get("/v1/health")
    assert unwell.value.status == 503
    assert "locked" in daemon.status()["ledger"]["error"]
    assert agent.welcome is None
    assert agent.directives == []
    other.execute("COMMIT")
    other.close()
    await until(lambda: agent.welcome, "the welcome")
    await until(lambda: daemon.status()["ledger"]["healthy"], "good health")
    assert [line for line in daemon.log_lines() if line["level"] == "error" and "ledger cannot be written" in line["msg"]]


async def test_while_postgres_is_away_nothing_is_decided_and_then_everything(
    make_daemon: MakeDaemon, make_agent: MakeAgent, postgres: Postgres
) -> None:
    """
    1. A job has its first agent. Postgres is stopped as in a crash.
    2. The second agent says hello: it is not welcomed. The daemon says what is wrong, its health is bad, the first agent stays.
    3. Postgres is back: the second agent is welcomed, by the same daemon in the same generation.
    """
    daemon = make_daemon("--database", postgres.fresh_database()).start()
    first = await make_agent("j1", "n1").connect(daemon)
    postgres.stop()
    try:
        second = await make_agent("j1", "n2").dial(daemon)
        await second.send(second.hello)
        await until(lambda: not daemon.status()["ledger"]["healthy"], "the daemon says that it cannot write")
        with pytest.raises(ClientError) as unwell:
            daemon.client.get("/v1/health")
        assert unwell.value.status == 503
        assert "see that Postgres runs" in daemon.status()["ledger"]["error"]
        assert (second.welcome, first.closed) == (None, None)
    finally:
        postgres.start()
    await until(lambda: second.welcome, "the welcome")
    await until(lambda: daemon.status()["ledger"]["healthy"], "good health")
    assert daemon.status()["generation"] == 1
    assert first.closed is None


async def test_on_a_full_disk_nothing_is_decided_until_there_is_room(make_daemon: MakeDaemon, make_agent: MakeAgent) -> None:
    daemon = make_daemon().start()
    full_bytes = (daemon.state_dir / "ledger.db-wal").stat().st_size
    before = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (full_bytes, resource.RLIM_INFINITY))
    agent = await make_agent().dial(daemon)
    await agent.send(agent.hello)
    await until(lambda: not daemon.status()["ledger"]["healthy"], "the daemon says that it cannot write")
    assert "disk" in daemon.status()["ledger"]["error"]
    assert agent.welcome is None
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, before)
    await until(lambda: agent.welcome, "the welcome")
    assert daemon.status()["ledger"]["healthy"]


def test_a_damaged_ledger_is_refused_at_the_start_with_the_remedy(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.end()
    ledger = daemon.state_dir / "ledger.db"
    contents = ledger.read_bytes()
    ledger.write_bytes(contents[:4096] + bytes(4096) + contents[8192:])
    refused = serve("--state-dir", str(daemon.state_dir), "--socket", str(daemon.socket))
    assert refused.returncode == 1
    assert f"cannot start: ledger sqlite:///{ledger} is damaged" in refused.stderr
    assert "bring a backup" in refused.stderr
    assert "Traceback" not in refused.stderr
    ledger.write_bytes(contents)
    assert daemon.start().status()["generation"] == 2


async def test_a_daemon_whose_ledger_was_taken_over_ends(
    make_daemon: MakeDaemon, make_agent: MakeAgent, database_url: str
) -> None:
    first = make_daemon("--database", database_url).start()
    second = make_daemon("--database", database_url).start()
    await make_agent().dial(first)
    agent = await make_agent().dial(first)
    await agent.send(agent.hello)
    assert first.process is not None
    assert first.process.wait(DEADLINE_S) == 75
    assert "another daemon has started on the ledger" in first.log_text()
    assert second.status()["generation"] == 2
    assert (await make_agent().connect(second)).welcome


def test_a_second_daemon_on_the_same_state_or_socket_is_refused(shared_daemon: Daemon, tmp_path: Path) -> None:
    daemon = shared_daemon
    same_state = serve("--state-dir", str(daemon.state_dir), "--socket", str(daemon.socket))
    assert (same_state.returncode, "another daemon runs on" in same_state.stderr) == (1, True), same_state.stderr
    assert "Traceback" not in same_state.stderr
    same_socket = serve("--state-dir", str(tmp_path / "other"), "--socket", str(daemon.socket))
    assert (same_socket.returncode, "another daemon listens on" in same_socket.stderr) == (1, True), same_socket.stderr
    assert daemon.status()["generation"] == 1, "the first one goes on"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"state_dir": "/proc/nowhere"}, "state directory /proc/nowhere.*--state-dir"),
        ({"socket": "/proc/nowhere/tmd.sock"}, "cannot listen on /proc/nowhere/tmd.sock.*--socket"),
        ({"listen": "256.0.0.1:1"}, r"cannot listen on 256\.0\.0\.1:1.*--listen"),
        ({"database": "mysql://x"}, "expected sqlite or postgresql"),
        ({"database": "sqlite:////proc/nowhere/x.db"}, "ledger sqlite.*/proc/nowhere/x.db: "),
        ({"operators": ("nobody-of-this-name",)}, "operators.*nobody-of-this-name"),
    ],
)
async def test_what_is_in_the_way_of_a_start_is_said(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tmd-") as sockets:
        given = {"state_dir": str(tmp_path), "socket": f"{sockets}/tmd.sock", "resource_manager": "none", **settings}
        config = load(environ={}, daemon_overrides=given)
        with pytest.raises((CannotStart, LedgerUnavailable, BadDatabaseUrl, UnknownUser), match=says):
            await asyncio.wait_for(service.serve(config, notifier=Notifier({})), 10)


async def test_the_service_manager_is_told_of_start_life_and_stop(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        daemon = make_daemon().start(environ={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000"})
        words = [manager.recv(200).decode() for _ in range(6)]
        assert "READY=1" in words
        assert words.count("WATCHDOG=1") >= 3
        assert any(word.startswith("STATUS=generation 1") for word in words)
        daemon.end()
        while manager.recv(200) != b"STOPPING=1":
            pass


def test_private_things_are_private(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
    modes = {path: path.stat().st_mode & 0o777 for path in (daemon.state_dir, daemon.socket.parent, daemon.socket)}
    assert modes == {daemon.state_dir: 0o700, daemon.socket.parent: 0o750, daemon.socket: 0o660}
    assert {(daemon.state_dir / name).stat().st_mode & 0o777 for name in ("ledger.db", "secret", "lock")} == {0o600}
