"""Finding and signalling the processes of one life of a local node.

A process belongs to a life if the life's random mark stands in the environment it was started with: that is inherited by
everything the agent starts, survives new sessions and a restart of the daemon, and cannot be there by chance. A signal goes
through a descriptor of the process that is opened before the mark is read, so a reused pid is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

#: The variable that carries the mark.
MARK_VARIABLE = "TMD_LOCAL_LIFE"
_PROC = Path("/proc")


def start_ticks(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None if it is gone or dead and not yet reaped.

    Raises OSError if that cannot be seen now, for want of descriptors for example.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    """True if this pid is still the process that was started at `ticks`."""
    return pid > 0 and start_ticks(pid) == ticks


def marked(mark: str) -> Iterator[tuple[int, int]]:
    """The living processes of a life as (pid, descriptor of the process); the descriptor is closed on the next turn.

    Raises OSError if they cannot be seen now: then none of them counts as gone.
    """
    needle = f"{MARK_VARIABLE}={mark}".encode()
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        pid = int(entry)
        # Others' processes are none of ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(pid)
            try:
                if needle in (_PROC / entry / "environ").read_bytes().split(b"\0") and start_ticks(pid) is not None:
                    yield pid, descriptor
            finally:
                os.close(descriptor)


def pids_of(mark: str) -> list[int]:
    return [pid for pid, _ in marked(mark)]


def signal_all(mark: str, number: signal.Signals, *, first: int = 0) -> int:
    """Sends the signal once to every process of the life; how many there were. `first`: this pid before the others."""
    reached = 0
    with contextlib.ExitStack() as stack:
        found = []
        for pid, descriptor in marked(mark):
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            found.append((pid != first, pid, kept))
        for _, _, descriptor in sorted(found):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
                reached += 1
    return reached


def signal_leader(mark: str, leader: int, number: signal.Signals) -> None:
    """Sends the signal to the agent of a life alone, if it still runs."""
    for pid, descriptor in marked(mark):
        if pid == leader:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)


def kill_all(mark: str, *, first: int = 0, timeout_s: float = 10.0) -> None:
    """SIGKILL to every process of the life, the agent first, again until none is left: one may fork while it is looked for.

    Raises TimeoutError if some outlive it (blocked in the kernel).
    """
    deadline = time.monotonic() + timeout_s
    while signal_all(mark, signal.SIGKILL, first=first):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids_of(mark)} outlive SIGKILL by {timeout_s:.0f} s")
        time.sleep(0.002)
