"""`tmd-run` in a container without munge: what the kernel asks of a container's first process is done."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.munge.container import HOST_NAME, Container
from tests.munge.munged import Munged, environment

DEADLINE_S = 120.0


def test_a_container_has_no_munge_at_all(munged: Munged, tmp_path: Path) -> None:
    """What the other tests rest on."""
    code = (
        "import os, sys, socket; from tmd.munge.library import *\n"
        "print(socket.gethostname(), os.listdir('/dev/shm'), os.path.exists(sys.argv[1]))\n"
        "try: Munge(sys.argv[1])\nexcept MungeAbsent: print('none')"
    )
    command = [sys.executable, "-c", code, munged.socket]
    container = Container(command, munged_folder=munged.folder, log=tmp_path / "log")
    assert (container.end(), container.said.split("\n")[:2]) == (0, [f"{HOST_NAME} [] False", "none"]), container.said


ORPHANS = """
import os, sys, time
for _ in range(3):  # each leaves a child behind that nobody but the container's first process can reap
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
def ended(): return [name for name in os.listdir("/proc") if name.isdigit() and state(name) == "Z"]
def state(name):
    try: return open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
    except OSError: return "gone"
deadline = time.monotonic() + 60
while ended():
    if time.monotonic() > deadline: sys.exit(f"not reaped: {ended()}")
    time.sleep(0.01)
print("first:", open("/proc/1/cmdline").read().split(chr(0))[1:3], flush=True)
if "wait" in sys.argv:
    print("waits", flush=True)
    time.sleep(600)
sys.exit(9)
"""


@pytest.fixture
def start(munged: Munged, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """`tmd-run --standalone` as the first process of a container, with a script that leaves orphans behind."""
    started: list[Container] = []
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)

    def start(*arguments: str) -> Container:
        command = [sys.executable, "-m", "tmd_worker.agent", "--standalone", str(script), *arguments]
        started.append(Container(command, munged_folder=munged.folder, log=tmp_path / "log"))
        return started[-1]

    yield start
    for container in started:
        container.kill()


def test_orphans_are_reaped_and_the_exit_code_is_the_ranks(start: Callable[..., Container]) -> None:
    container = start()
    assert container.end() == 9, container.said
    assert "first: ['-m', 'tmd_worker.agent']" in container.said


def test_a_stop_signal_reaches_the_ranks(start: Callable[..., Container]) -> None:
    container = start("wait")
    deadline = time.monotonic() + DEADLINE_S
    while "waits" not in container.said:
        assert time.monotonic() < deadline, container.said
        time.sleep(0.05)
    container.first().send_signal(signal.SIGTERM)
    assert container.end() == 128 + signal.SIGTERM, container.said
    assert "SIGTERM: passed on to the ranks" in container.said


def test_without_a_proc_of_its_own_nobody_is_watched_there() -> None:
    """Else the exit of any process of the machine would be taken for a rank's."""
    watch = "from tmd_worker.agent.exits import ExitWatch; watch = ExitWatch(lambda pid: None)"
    code = f"import os; {watch}; print(os.getpid(), watch.add(os.getpid()))"
    for options, seen in (["--mount-proc"], "1 True"), ([], "1 False"):
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *options, sys.executable, "-c", code]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert done.stdout.strip() == seen
