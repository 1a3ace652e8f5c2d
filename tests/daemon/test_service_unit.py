"""tmd.service: what systemd makes of it, and a real daemon under a service manager's eyes."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.rig import DEADLINE_S, ROOT, Daemon
from tmd.daemon.main import EXIT_TAKEN_OVER, EXIT_USAGE

UNIT = ROOT / "tmd.service"
WATCHDOG_S = 1.5


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit as it would be installed here: with a program that is there."""
    assert shutil.which("systemd-analyze"), "these tests need systemd-analyze: scripts/setup-munge installs it"
    unit = tmp_path / "tmd.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE))
    return unit


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, timeout=60)


def test_systemd_has_nothing_to_say_against_it(installed: Path) -> None:
    done = analyze("verify", str(installed))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wrong_line_would_be_noticed(installed: Path) -> None:
    installed.write_text(installed.read_text().replace("ProtectClock=yes", "ProtectClocks=yes"))
    assert "ProtectClocks" in analyze("verify", str(installed)).stderr


def test_its_exposure_stays_low(installed: Path) -> None:
    """Of 10, by systemd's count; what is left is the network, unix sockets, and what local nodes need."""
    done = analyze("security", "--offline=true", "--threshold=20", str(installed))
    assert done.returncode == 0, done.stdout


def test_its_promises_are_those_of_the_code() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert service["RestartPreventExitStatus"].split() == [str(EXIT_USAGE), str(EXIT_TAKEN_OVER)]
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert (service["User"], service["CapabilityBoundingSet"], service["NoNewPrivileges"]) == ("tmd", "", "yes")
    assert (service["StateDirectoryMode"], service["RuntimeDirectoryMode"]) == ("0700", "0750")


# -------------------------------------------------------------------- the daemon and its service manager


class ServiceManager:
    """The end of NOTIFY_SOCKET that systemd holds."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.environ = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}

    def next(self, within_s: float = DEADLINE_S) -> str | None:
        """The next word, None if the time is up."""
        self._socket.settimeout(within_s)
        try:
            return self._socket.recv(1000).decode()
        except TimeoutError:
            return None

    def waits_for(self, word: str) -> list[str]:
        """What came before it."""
        deadline = time.monotonic() + DEADLINE_S
        before: list[str] = []
        while (heard := self.next()) != word:
            assert heard is not None, f"{word} never came, after {before}"
            assert time.monotonic() < deadline, f"{word} never came, after {before}"
            before.append(heard)
        return before

    def heard(self) -> set[str]:
        """All that has come until now."""
        words = set()
        while (word := self.next(0.001)) is not None:
            words.add(word)
        return words

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    with tempfile.TemporaryDirectory(prefix="tmd-") as folder:
        manager = ServiceManager(Path(folder))
        yield manager
        manager.close()


def test_the_service_manager_hears_of_a_daemons_whole_life(make_daemon: Callable[..., Daemon], manager: ServiceManager) -> None:
    """
    1. It is ready once it listens, and not before.
    2. Its watchdog is fed while it lives.
    3. It hangs: nothing comes any more for longer than the watchdog allows, so systemd would end it.
    4. It says that it stops before it stops.
    """
    daemon = make_daemon().start(environ=manager.environ)
    assert any(word.startswith("STATUS=generation 1") for word in manager.waits_for("READY=1"))
    for _ in range(4):
        manager.waits_for("WATCHDOG=1")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        manager.heard()
        assert manager.next(2 * WATCHDOG_S) is None
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    manager.waits_for("WATCHDOG=1")
    assert daemon.end() == 0
    manager.waits_for("STOPPING=1")


def test_a_daemon_that_cannot_start_is_never_ready(make_daemon: Callable[..., Daemon], manager: ServiceManager) -> None:
    daemon = make_daemon()
    with pytest.raises(AssertionError, match="ended with 1"):
        daemon.start("--listen", "203.0.113.1:7070", environ=manager.environ)
    assert manager.heard() <= {"WATCHDOG=1"}
