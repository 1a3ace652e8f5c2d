"""A daemon with a local cluster in a folder of its own, for the demo and the benchmarks: start, use, leave nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tmd.cli.client import Client, ClientError
from tmd.demo.ending import uninterrupted
from tmd.nodes.local import kill_what_is_left

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class StackError(RuntimeError):
    """The daemon did not start, stop or answer; the text has the end of its log."""


#: The nodes are spread over so many, or one each.
RACKS = 3


class Stack:
    """Use as a context manager. `client` speaks to the daemon. Variables TMD_* of the caller, which may be meant for another
    daemon, do not reach this one nor its agents."""

    def __init__(
        self, folder: Path, *, nodes: int, core: dict[str, float | bool] | None = None, database: str | None = None
    ) -> None:
        self.folder = folder
        self.log = folder / "daemon.log"
        # The path of a unix socket is limited to 107 bytes, so it cannot live in an output folder of any depth.
        self._sockets = tempfile.TemporaryDirectory(prefix="tmd-demo-")
        self.socket = Path(self._sockets.name) / "tmd.sock"
        self._config = folder / "tmd.toml"
        self._state_dir = folder / "state"
        self._nodes = nodes
        self._core = core or {}
        self._database = ["--database", database] if database else []
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Client(str(self.socket))

    def __enter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        core = [f"{key} = {json.dumps(value)}" for key, value in self._core.items()]
        lines = ["[local]", f"nodes = {self._nodes}", f"racks = {min(self._nodes, RACKS)}", "[core]", *core]
        self._config.write_text("\n".join(lines) + "\n")
        # For a KeyboardInterrupt that comes right before `__exit__` has begun.
        atexit.register(self._end)
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def start(self) -> None:
        """Starts the daemon and waits until it answers. Raises StackError."""
        places = ["--config", self._config, "--state-dir", self._state_dir, "--socket", self.socket, *self._database]
        command = [sys.executable, "-m", "tmd.daemon.main", "serve", *map(str, places), "--resource-manager", "local"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TMD_")}
        with self.log.open("ab") as log, uninterrupted():
            # In a session of its own: Ctrl-C and timeout(1) signal the whole group of processes, and the daemon would be gone.
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ClientError):
                self.client.get("/v1/health")
                return
            time.sleep(0.05)
        raise StackError(f"the daemon did not start; the end of {self.log}:\n{self._tail()}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9 of the daemon; `start` brings up the next one."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def submit(self, **request: Any) -> str:
        """POST /v1/local/jobs; returns the job's id."""
        job_id: str = self.client.post("/v1/local/jobs", request)["job_id"]
        return job_id

    def job(self, job_id: str) -> dict[str, Any] | None:
        """JobView as JSON; None as long as the daemon knows no such job."""
        try:
            view: dict[str, Any] = self.client.get(f"/v1/jobs/{job_id}")
        except ClientError as error:
            if error.status == 404:
                return None
            raise
        return view

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with uninterrupted():
            self._end()

    def _end(self) -> None:
        """The daemon first, which could start something anew; then what its nodes run, whatever became of the daemon."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        kill_what_is_left(self._state_dir)
        self._sockets.cleanup()
        atexit.unregister(self._end)

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:]) if self.log.exists() else "(no log)"
