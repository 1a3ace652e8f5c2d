"""What a rank forks (workers of a data loader) ends with it, however it ends; torch's own workers look for their parent only
every five seconds, and never while they load a sample.

Contract: after `bind_forks` every child that the main thread forks is killed by the kernel when this process ends. A child of
another thread is left alone: the kernel would kill it when that thread ends. Programs that are started are left alone too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
#: Who forks, as noted by the parent right before: its pid, 0 for a thread whose children are left alone.
_forking_pid = 0
_bound = False


def end_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends. Raises OSError if the kernel refuses.

    If `parent_pid` has ended already, this process ends here."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def bind_forks() -> None:
    """From now on, in this process and those that it forks. Idempotent."""
    global _bound
    if not _bound:
        _bound = True
        os.register_at_fork(before=_note, after_in_child=_bind)


def _note() -> None:
    global _forking_pid
    _forking_pid = os.getpid() if threading.current_thread() is threading.main_thread() else 0


def _bind() -> None:
    if _forking_pid:
        end_with_parent(_forking_pid)
