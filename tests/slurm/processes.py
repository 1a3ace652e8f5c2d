"""The daemons of one cluster, by name, below a keeper (`tests.slurm.keeper`) that ends all of them with the cluster."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
#: slurmctld writes its state down first, and waits for its threads.
STOP_TIMEOUT_S = 40.0


class Processes:
    """Use: `start` and `stop` by name, then `close`, which ends everything with SIGKILL."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        #: Name -> (pid, pidfd). The descriptor tells a process from a later one of the same number.
        self._daemons: dict[str, tuple[int, int]] = {}

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        assert not self.alive(name), f"{name} runs already"
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)}) + "\n")
        self._keeper.stdin.flush()
        answer = json.loads(self._keeper.stdout.readline())
        assert "pid" in answer, f"{name} is not started: {answer['error']}"
        self._forget(name)
        with contextlib.suppress(ProcessLookupError):
            self._daemons[name] = (answer["pid"], os.pidfd_open(answer["pid"]))

    def alive(self, name: str) -> bool:
        return name in self._daemons and not select.select([self._daemons[name][1]], [], [], 0)[0]

    def pid(self, name: str) -> int:
        """Of a daemon that was alive a moment ago. Raises KeyError if it was never started."""
        return self._daemons[name][0]

    def send(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._daemons[name][1], number)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Returns once it has ended; one that is not there is none to stop."""
        if name not in self._daemons:
            return
        self.send(name, number)
        ended = select.select([self._daemons[name][1]], [], [], STOP_TIMEOUT_S)[0]
        assert ended, f"{name} has not ended {STOP_TIMEOUT_S:.0f} s after {number.name}"

    def below(self) -> list[psutil.Process]:
        """All that these daemons and their jobs have started, wherever it has gone since."""
        return psutil.Process(self._keeper.pid).children(recursive=True)

    def close(self) -> None:
        """Returns once nothing is left."""
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        try:
            assert self._keeper.wait(STOP_TIMEOUT_S) == 0, "the keeper left processes behind"
        finally:
            if self._keeper.poll() is None:
                self._keeper.kill()
                self._keeper.wait(STOP_TIMEOUT_S)
            if self._keeper.stdout is not None:
                self._keeper.stdout.close()
            for name in list(self._daemons):
                self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._daemons:
            os.close(self._daemons.pop(name)[1])
