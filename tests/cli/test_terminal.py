"""On a terminal tmctl shows tables that fit."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

from tests.cli.fake_daemon import DONE, FakeDaemon, migration_view, plain


def on_terminal(daemon: FakeDaemon, width: int, *arguments: str) -> str:
    """What tmctl shows on a terminal of this width."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "tmd.cli.main", "--socket", str(daemon.socket), *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the way in which Linux says that the other end is closed
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    assert process.wait(10) == 0
    return re.sub("\x1b\\[[0-9;]*m", "", shown.decode())


def test_a_terminal_that_is_wide_enough_gets_a_table(daemon: FakeDaemon) -> None:
    daemon.answers["GET /v1/migrations?limit=100"] = {"migrations": [plain(migration_view(**DONE))]}
    lines = on_terminal(daemon, 250, "migrations").splitlines()
    assert len(lines) == 2
    assert lines[0].index("copy (ms)") + len("copy (ms)") == lines[1].index("52.0") + len("52.0")


def test_a_narrow_terminal_gets_a_block_for_each_row(daemon: FakeDaemon) -> None:
    daemon.answers["GET /v1/migrations?limit=100"] = {"migrations": [plain(migration_view(**DONE))]}
    lines = on_terminal(daemon, 80, "migrations").splitlines()
    assert lines[0] == "── m1"
    assert "  copy (ms)         52.0" in lines
    assert max(map(len, lines)) <= 80
