"""The socket of the plugin's hints: cheap to send to, harmless to flood."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from tmd.nodes.slurm.hints import HintSocket


async def test_whatever_comes_is_heard_and_a_burst_only_once(tmp_path: Path) -> None:
    heard = asyncio.Event()
    times: list[int] = []
    hints = HintSocket(tmp_path / "made" / "hints", lambda: (times.append(1), heard.set()))  # type: ignore[func-returns-value]
    hints.open()
    path = str(tmp_path / "made" / "hints")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as plugin:
        for _ in range(5):
            plugin.sendto(b"x" * 1000, path)
        await asyncio.wait_for(heard.wait(), 10)
    assert times == [1]
    hints.close()
    hints.close()
    assert "hints" not in os.listdir(tmp_path / "made")


async def test_any_user_may_send_and_nobody_else_may_read(tmp_path: Path) -> None:
    hints = HintSocket(tmp_path / "hints", lambda: None)
    hints.open()
    assert stat.S_IMODE((tmp_path / "hints").stat().st_mode) == 0o622
    hints.close()


async def test_what_an_earlier_daemon_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as earlier:
        earlier.bind(str(tmp_path / "hints"))
    hints = HintSocket(tmp_path / "hints", lambda: None)
    hints.open()
    hints.close()


async def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hints").write_text("somebody's notes")
    with pytest.raises(OSError, match="in use"):
        HintSocket(tmp_path / "hints", lambda: None).open()
    assert (tmp_path / "hints").read_text() == "somebody's notes"
