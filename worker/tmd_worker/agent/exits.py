"""Sees that a process is dying before the kernel says so.

The kernel reports an exit (and closes the sockets) only after it has freed the memory: about 70 ms per GiB. PF_EXITING is
set before that. One thread reads the flags of every watched process each few milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_PF_EXITING = 0x4
#: Position of `flags` behind the command name, which ends in the last ")" (proc(5), field 9).
_FLAGS_FIELD = 6
#: Costs about 1% of a core on a virtual machine, with one process as with eight: it is the wake-up, not the reading.
POLL_S = 0.008


def is_exiting(stat: bytes) -> bool:
    """Whether this content of /proc/PID/stat (its first 200 bytes are enough) belongs to a process that is dying."""
    behind_name = stat[stat.rindex(b")") + 2 :]
    return bool(int(behind_name.split(b" ", _FLAGS_FIELD + 1)[_FLAGS_FIELD]) & _PF_EXITING)


def sees_own_processes() -> bool:
    """False where /proc is missing, or shows the pids of another namespace (a container without a /proc of its own)."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


class ExitWatch:
    """Calls `on_exiting(pid)` once per watched process, from its own thread."""

    def __init__(self, on_exiting: Callable[[int], object], poll_s: float = POLL_S) -> None:
        self._on_exiting = on_exiting
        self._poll_s = poll_s
        self._sees = sees_own_processes()
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="exit-watch", daemon=True)
        self._thread.start()

    def add(self, pid: int) -> bool:
        """False if it cannot be watched (no /proc of this pid namespace, or it is gone already): then its pidfd tells, later."""
        if not self._sees:
            return False
        # The file of the main thread, not of the process: the kernel then adds up no other threads' times.
        try:
            descriptor = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        with self._lock:
            self._descriptors[pid] = descriptor
        self._wanted.set()
        return True

    def remove(self, pid: int) -> None:
        with self._lock:
            descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._thread.join()
        for pid in list(self._descriptors):
            self.remove(pid)

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            with self._lock:
                dying = [pid for pid, descriptor in self._descriptors.items() if self._is_dying(descriptor)]
                for pid in dying:
                    os.close(self._descriptors.pop(pid))
                if not self._descriptors and not self._closed:
                    self._wanted.clear()
            for pid in dying:
                self._on_exiting(pid)
            time.sleep(self._poll_s)

    @staticmethod
    def _is_dying(descriptor: int) -> bool:
        try:
            return is_exiting(os.pread(descriptor, 200, 0))
        except ProcessLookupError:
            return True
