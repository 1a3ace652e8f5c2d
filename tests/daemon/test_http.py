"""The daemon's listeners against clients that come in crowds or speak no HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp.http_exceptions import BadHttpMessage

from tests.daemon.rig import DEADLINE_S, Daemon
from tmd.daemon.http_log import QUIET_S, ClientMistakes

POST = b"POST /v1/nodes/n1/drain HTTP/1.1\r\nHost: tmd\r\n"
RUBBISH = {
    "zeros": bytes(1000),
    "a header that is too long": b"GET /v1/health HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    "a chunk without a size": POST + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    "a length that is no number": POST + b"Content-Length: many\r\n\r\n",
    "compressed what is not": POST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    "no URL": b"GET http://[::1 HTTP/1.1\r\nHost: tmd\r\n\r\n",
}


def send(path: Path, data: bytes, *, leave: bool = False) -> bytes:
    """The answer; empty for a client that leaves without it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(30)
        client.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            client.sendall(data)
        return b"" if leave else client.recv(4096)


def test_rubbish_is_turned_away_and_fills_no_log(daemon: Daemon) -> None:
    for what, data in RUBBISH.items():
        for _ in range(3):
            assert b" 400 Bad Request" in send(daemon.socket, data), what
    send(daemon.socket, POST + b"Content-Length: 100\r\n\r\n{", leave=True)
    daemon.client.get("/v1/health")
    complaints = [line for line in daemon.log_lines() if line["level"] not in ("debug", "info")]
    assert [line["level"] for line in complaints] == ["warning"]
    assert "a client sent what is not HTTP" in complaints[0]["msg"]
    assert "Traceback" not in daemon.log_text()


def test_a_crowd_that_comes_at_once_is_let_in(daemon: Daemon) -> None:
    """1. The daemon is held up. 2. More connections come than a small backlog takes. 3. It goes on and serves."""
    crowd = min(500, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    os.kill(daemon.pid, signal.SIGSTOP)
    with contextlib.ExitStack() as open_ones:
        try:
            for _ in range(crowd):
                client = open_ones.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                client.connect(str(daemon.socket))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.client.get("/v1/health")


def mistake() -> logging.LogRecord:
    error = BadHttpMessage("Bad\r\n  chunk" + "x" * 1000)
    return logging.LogRecord("aiohttp.server", logging.ERROR, "x.py", 1, "Error", (), (type(error), error, None))


def test_agents_that_hang_up_before_they_are_answered_are_no_error(daemon: Daemon) -> None:
    """1. The daemon is held up. 2. Agents call and leave. 3. It goes on, and has nobody to answer."""
    call = b"GET /v1/agent HTTP/1.1\r\nHost: tmd\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    call += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n\r\n"
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            send(daemon.socket, call, leave=True)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    daemon.client.get("/v1/health")
    assert [line for line in daemon.log_lines() if line["level"] == "error"] == []
    assert "Traceback" not in daemon.log_text()


def test_of_many_mistakes_one_is_told_a_minute() -> None:
    now_s = 100.0
    mistakes = ClientMistakes(lambda: now_s)
    first, others = mistake(), [mistake() for _ in range(7)]
    assert mistakes.filter(first)
    assert not any(mistakes.filter(each) for each in others)
    now_s += QUIET_S
    assert mistakes.filter(later := mistake())
    assert (first.levelname, first.exc_info, "\n" in first.getMessage(), len(first.getMessage()) < 300) == (
        "WARNING",
        None,
        False,
        True,
    )
    assert later.getMessage().endswith("; 7 more like it since the last such line")


def test_what_is_no_clients_mistake_is_told_in_full() -> None:
    error = RuntimeError("a bug")
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "x.py", 1, "Error", (), (type(error), error, None))
    assert ClientMistakes().filter(record)
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


def test_who_only_connects_over_tcp_takes_the_daemon_from_nobody(make_daemon: Callable[..., Daemon]) -> None:
    """1. Somebody opens more connections than the daemon may have files, and ends no request. 2. Operators are served.
    3. All those connections are ended, and the log has some lines of it, not a thousand a second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    few_files = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    daemon = make_daemon("--listen", f"127.0.0.1:{address[1]}").start(prefix=few_files)
    with contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(400)]
        for each in idle:
            with contextlib.suppress(ConnectionError):
                each.sendall(b"GET /v1/health HTTP/1.1\r\nX: ")
        daemon.client.get("/v1/status")
        for each in idle:
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
    told = [line["msg"] for line in daemon.log_lines() if line["level"] != "info"]
    assert any("connections over TCP are open" in line for line in told)
    assert len(told) < 20, told
