"""Told to end at any moment, and nothing is left behind all the same.

Contract: who starts processes that would outlive it calls `end_as_on_ctrl_c` first. From then on SIGINT, SIGTERM and SIGHUP raise
KeyboardInterrupt in the main thread, and only the first of them does: what comes later cannot break off the ending that is under
way. Within `uninterrupted` the first one waits until that is over.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

#: How many `uninterrupted` the main thread is in.
_depth = 0
_told = _raised = False


def end_as_on_ctrl_c() -> None:
    """Whoever is told to end (SIGTERM, a terminal that closes) ends what it has started, as it does on Ctrl-C. What was ignored
    from the start (nohup) stays so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _hear)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """For what must be done as a whole: a process is started *and* noted, everything is ended. It must have deadlines of its own.

    Raises KeyboardInterrupt when it is over if a signal came meanwhile."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _told:
            _raise_once()


def _hear(_number: int, _frame: FrameType | None) -> None:
    # A second one is no other wish: timeout(1) signals the process and then its group, and people press Ctrl-C twice.
    global _told
    _told = True
    _raise_once()


def _raise_once() -> None:
    global _raised
    if not _depth and not _raised:
        _raised = True
        raise KeyboardInterrupt
