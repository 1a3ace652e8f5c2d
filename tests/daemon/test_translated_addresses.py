"""Nodes whose addresses are translated on the way to the daemon are refused with the reason: nobody could reach their ranks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.daemon.records import job
from tests.daemon.rig import Daemon
from tests.daemon.test_admission import OWNER, hello
from tests.daemon.test_agents import free_port
from tmd.daemon.admission import Admissions, NotAdmitted, Tokens

#: Whom the daemon sees when somebody comes through the relay.
OUTSIDE = "127.0.0.9"


@pytest.mark.parametrize(
    ("own_end", "seen_from"),
    [
        ("", "10.0.0.1"),  # an older agent does not say
        ("10.0.0.1", ""),  # a unix socket
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "::ffff:10.0.0.1"),
        ("2001:db8::1", "2001:0db8:0::1"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_an_address_that_is_the_same_on_both_ends_is_none(own_end: str, seen_from: str, tmp_path: Path) -> None:
    admissions = Admissions(Tokens(tmp_path), lambda job_id: None)
    assert admissions.admit(hello(own_end=own_end), OWNER, seen_from).uid == OWNER


def test_an_address_that_is_another_one_is_refused_unless_ranks_run_there_already(tmp_path: Path) -> None:
    admissions = Admissions(Tokens(tmp_path), lambda job_id: job(owner_uid=OWNER))
    with pytest.raises(NotAdmitted, match=r"node n1 calls itself 172.17.0.2 .* sees it come from 10.0.0.1: .*NAT"):
        admissions.admit(hello(own_end="172.17.0.2"), OWNER, "10.0.0.1")
    returning = hello(own_end="172.17.0.2", key_fingerprint="f" * 32)
    assert admissions.admit(returning, OWNER, "10.0.0.1").uid == OWNER


@contextlib.asynccontextmanager
async def translation(port: int) -> AsyncIterator[int]:
    """A way to that port on which everybody comes from OUTSIDE; yields its own port."""

    async def relay(inner: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        outer, onward = await asyncio.open_connection("127.0.0.1", port, local_addr=(OUTSIDE, 0))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    sink.write(data)
                    await sink.drain()
                sink.close()

        await asyncio.gather(pump(inner, onward), pump(outer, answer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_tmd_run_behind_a_translation_ends_with_the_reason(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    listening = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{listening}").start()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "token").write_text(daemon.client.post("/v1/jobs/j1/token")["token"])
    async with translation(listening) as port:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tmd_worker.agent.main", "--daemon", f"http://127.0.0.1:{port}", "--job-id", "j1"),
            *("--node", "n1", "--nnodes", "1", "--token-file", str(tmp_path / "token"), str(tmp_path / "train.py")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(agent.communicate(), 60)
    assert agent.returncode != 0
    assert f"calls itself 127.0.0.1 on its connection to the daemon, which sees it come from {OUTSIDE}" in output.decode()
    assert daemon.client.get("/v1/jobs")["jobs"] == []
