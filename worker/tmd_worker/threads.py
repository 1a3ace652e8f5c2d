"""Threads of the library: one that dies silently is a hang, so an exception in any of them ends the process."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

from tmd.protocol.exits import EXIT_THREAD
from tmd_worker import guard

#: Starts a thread of this name with this body.
Spawn = Callable[[str, Callable[[], None]], None]


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that the sandbox's guard lets alone.

    An exception that leaves `target` ends the process with EXIT_THREAD and its traceback.
    """
    thread = threading.Thread(target=_guarded, args=(name, target), name=f"tmd-{name}", daemon=True)
    thread.start()
    return thread


def end_process(code: int, message: str) -> None:
    """Writes the message and ends the process at once: no handler, no other thread's clean-up, nothing that could block."""
    print(f"tmd: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more
    os._exit(code)


def _guarded(name: str, target: Callable[[], None]) -> None:
    try:
        with guard.exempt():
            target()
    except BaseException:
        end_process(EXIT_THREAD, f"thread {name} failed, so this rank ends and will be replaced\n{traceback.format_exc()}")
