"""A command of ours in a process of its own, and everything that was started by it, whoever started it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


class Command:
    """`process` leads a group of processes, as every command of a shell does; its output is in the file `output`."""

    def __init__(self, module: str, arguments: list[str], output: Path) -> None:
        self._mark = f"MARK_OF_TEST={secrets.token_hex(8)}"
        self.output = output
        name, value = self._mark.split("=")
        packages = f"{ROOT}{os.pathsep}{ROOT / 'worker'}"
        with output.open("wb") as log:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", name: value},
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def running(self) -> list[int]:
        """Every process that was started with the mark in its environment, or by such a one."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                living = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if living and self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def tell_to_end(self, number: signal.Signals) -> None:
        """Its whole group, again and again, until it has ended. The exit code is its own or that of a signal at the very end."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it has not ended"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            time.sleep(0.005)

    def says(self, text: str) -> bool:
        return text in self.output.read_text()


@contextlib.contextmanager
def started(module: str, arguments: list[str], output: Path) -> Iterator[Command]:
    """Ended with all that it has started, whatever the test finds."""
    command = Command(module, arguments, output)
    try:
        yield command
    finally:
        while running := command.running():
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        command.process.wait(DEADLINE_S)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
