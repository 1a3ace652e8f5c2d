"""The processes that a rank forks end with it, also when it is killed while they are busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0


def gone(pid: int) -> bool:
    """Within the deadline. A zombie counts: whoever inherits it has not looked yet."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def rank(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    """A program under tmd_worker.boot, as an agent starts it."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "TMD_AGENT_PID": str(os.getpid())}
    command = [sys.executable, "-u", "-m", "tmd_worker.boot", str(script)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_busy_child_of_a_rank_that_is_killed_ends_too(tmp_path: Path) -> None:
    with rank(
        tmp_path,
        """
        import multiprocessing, time
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        print(child.pid)
        time.sleep(600)
        """,
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        assert gone(child_pid)


def test_a_child_does_not_end_with_the_thread_that_forked_it(tmp_path: Path) -> None:
    """A thread that opens a loader and ends would take the workers along."""
    with rank(
        tmp_path,
        """
        import os, sys, threading
        reader, writer = os.pipe()
        children = []

        def fork():
            pid = os.fork()
            if pid == 0:
                os.read(reader, 1)
                os._exit(7)
            children.append(pid)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        os.write(writer, b"x")
        print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        """,
    ) as parent:
        output, _ = parent.communicate(timeout=TIMEOUT_S)
    assert output == "7\n"
