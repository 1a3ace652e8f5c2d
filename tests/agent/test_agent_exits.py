"""Seeing an exit before the kernel reports it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys

import pytest

from tmd_worker.agent.exits import ExitWatch, is_exiting


@pytest.mark.parametrize("name", ["python", "a) b (c", "R 1 2 3 4 5 6 7"])
def test_the_flag_is_found_whatever_the_process_is_called(name: str) -> None:
    def stat(flags: int) -> bytes:
        return f"12 ({name}) R 1 2 2 0 -1 {flags} 100 0 0".encode()

    assert is_exiting(stat(0x400004))
    assert not is_exiting(stat(0x400000))


def test_a_killed_process_is_seen_before_it_has_gone() -> None:
    seen: queue.Queue[tuple[int, bool]] = queue.Queue()
    child = subprocess.Popen(
        [sys.executable, "-c", "memory = b'1' * (1 << 28); print(); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    watch = ExitWatch(lambda pid: seen.put((pid, child.poll() is None)), poll_s=0.001)
    try:
        child.stdout.readline()
        watch.add(child.pid)
        with pytest.raises(queue.Empty):
            seen.get(timeout=0.05)
        child.kill()
        assert seen.get(timeout=10) == (child.pid, True)
    finally:
        watch.close()
        child.kill()
        child.communicate()


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = ExitWatch(lambda pid: None)
    watch.add(os.getpid())
    watch.add(1 << 30)  # nobody has that pid
    assert len(os.listdir("/proc/self/fd")) == before + 1
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
