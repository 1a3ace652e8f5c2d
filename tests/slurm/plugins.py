"""tmd's Slurm plugins as the tests build, load and observe them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options, other_slurm

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "plugins"
BUILD_TIMEOUT_S = 120.0
#: How long an event may take to come; nodes that do not answer are noticed after some seconds.
EVENT_DEADLINE_S = 20.0

#: Where job_submit/tmd in slurmctld sends events; part of slurmctld's environment.
SOCKET_VARIABLE = "TMD_EVENTS_SOCKET"


def make(*arguments: str) -> str:
    """Runs `make` with plugins/Makefile, for the Slurm of the tests; returns what it printed."""
    slurm = f"SLURM_PREFIX={other_slurm() or ''}"
    done = subprocess.run(
        ["make", "-C", str(SOURCES), slurm, *arguments], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"make {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def lua_files() -> dict[str, str]:
    return {name: (SOURCES / name).read_text() for name in ("job_submit.lua", "tmd_standby.lua")}


def plugstack() -> str:
    return (ROOT / "etc" / "plugstack.conf").read_text()


def loaded(folder: Path, **changes: Any) -> Options:
    """A cluster that loads the plugins in `folder`, with the samples of etc/."""
    options: dict[str, Any] = {
        "plugstack": plugstack(),
        "job_submit_plugins": "lua,tmd",
        "plugin_dirs": (folder,),
        "files": lua_files(),
    }
    return Options(**(options | changes))


def finished(cluster: SlurmCluster, script: str, *options: str, user: str | None = None) -> str:
    """Runs a job to its end, as root or as this user; returns what it printed."""
    output = cluster.places.shared / "job.out"
    output.unlink(missing_ok=True)
    job = cluster.sbatch(script, *options, "--output", str(output), user=user)
    cluster.wait_for(lambda: not cluster.run("squeue", "-h", "-j", job, check=False).stdout.strip(), f"job {job} to end")
    return output.read_text()


def environment(text: str) -> dict[str, str]:
    """From the output of `env`."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def fields(cluster: SlurmCluster, job: str) -> dict[str, str]:
    """What `scontrol show job` says."""
    text = cluster.run("scontrol", "-o", "show", "job", job).stdout
    return dict(re.findall(r"(\S+?)=(\S*)", text))


def wait_for_looks(cluster: SlurmCluster) -> None:
    """Until the watcher in slurmctld has surely looked at what has changed by now: its thread has slept and woken often enough.

    It sleeps before each look at whether something has changed, and while it waits for an answer: less than 30 times.
    """
    before = _sleeps(cluster)
    cluster.wait_for(lambda: _sleeps(cluster) >= before + 60, "the watcher to look at the nodes")


def _sleeps(cluster: SlurmCluster) -> int:
    for process in psutil.process_iter(["name", "environ"]):
        if process.info["name"] == "slurmctld" and (process.info["environ"] or {}).get("SLURM_CONF") == str(
            cluster.places.slurm_conf
        ):
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                if (task / "comm").read_text() == "tmd_watch\n":
                    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
                    assert found is not None
                    return int(found[1])
    raise AssertionError("slurmctld has no thread that watches nodes")


class Events:
    """The receiving end of the events, as the daemon's will be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        self.socket.bind(str(path))

    def close(self) -> None:
        self.socket.close()
        self._path.unlink(missing_ok=True)

    def waiting(self) -> list[dict[str, Any]]:
        """What has arrived, and returns at once."""
        received = []
        with contextlib.suppress(BlockingIOError):
            while True:
                received.append(json.loads(self.socket.recv(4096)))
        return received

    def wait(self, **expected: Any) -> dict[str, Any]:
        """The next event with these values; what comes before it is dropped. Raises AssertionError after EVENT_DEADLINE_S."""
        deadline = time.monotonic() + EVENT_DEADLINE_S
        seen = []
        while time.monotonic() < deadline:
            for event in self._next():
                seen.append(event)
                if all(event.get(key) == value for key, value in expected.items()):
                    return event
            time.sleep(0.002)
        raise AssertionError(f"no event with {expected} in {EVENT_DEADLINE_S:.0f} s, but {seen}")

    def _next(self) -> list[dict[str, Any]]:
        with contextlib.suppress(BlockingIOError):
            return [json.loads(self.socket.recv(4096))]
        return []


@contextlib.contextmanager
def events_go_to(path: Path) -> Iterator[None]:
    """slurmctlds that are started meanwhile send to `path`."""
    before = os.environ.get(SOCKET_VARIABLE)
    os.environ[SOCKET_VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SOCKET_VARIABLE]
        else:
            os.environ[SOCKET_VARIABLE] = before
