"""What the service manager is told, and how log lines look."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmd.daemon.logs import JsonFormatter, LogfmtFormatter
from tmd.daemon.notify import Notifier


@pytest.fixture
def service_manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver


def test_words_arrive_as_datagrams(service_manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": service_manager.getsockname()})
    notifier.ready()
    notifier.status("two lines\nare one")
    notifier.stopping()
    assert [service_manager.recv(100) for _ in range(3)] == [b"READY=1", b"STATUS=two lines", b"STOPPING=1"]


def test_an_abstract_socket_works_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0tmd-test-{os.getpid()}")
        receiver.settimeout(5)
        Notifier({"NOTIFY_SOCKET": f"@tmd-test-{os.getpid()}"}).ready()
        assert receiver.recv(100) == b"READY=1"


async def test_the_watchdog_is_fed_three_times_as_often_as_it_bites(service_manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": service_manager.getsockname(), "WATCHDOG_USEC": "60000"})
    assert notifier.watchdog_s == 0.06
    feeding = asyncio.create_task(notifier.feed_watchdog())
    for _ in range(4):
        assert await asyncio.to_thread(service_manager.recv, 100) == b"WATCHDOG=1"
    feeding.cancel()


async def test_nobody_who_watches_is_nobody_to_tell() -> None:
    for environ in ({}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "junk"}):
        notifier = Notifier(environ)
        notifier.ready()
        assert notifier.watchdog_s is None
        await asyncio.wait_for(notifier.feed_watchdog(), 1)


def test_a_service_manager_that_is_gone_is_said_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert "READY=1" in caplog.text


def line(**extra: object) -> logging.LogRecord:
    record = logging.LogRecord("tmd", logging.WARNING, "x.py", 1, "rank %d = lost", (3,), None)
    record.__dict__.update(extra)
    return record


def test_log_lines_carry_job_migration_and_epoch() -> None:
    text = LogfmtFormatter().format(line(job="j1", migration="m1", epoch=4, node=None))
    assert text.endswith('Z level=warning msg="rank 3 = lost" job=j1 migration=m1 epoch=4')
    fields = json.loads(JsonFormatter().format(line(job="j1", epoch=0)))
    assert (fields["level"], fields["msg"], fields["job"], fields["epoch"]) == ("warning", "rank 3 = lost", "j1", 0)
    assert "node" not in fields


def test_a_traceback_stays_on_one_line() -> None:
    record = line()
    try:
        raise ValueError("broken")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "\n" not in LogfmtFormatter().format(record)
    assert "broken" in json.loads(JsonFormatter().format(record))["traceback"]
