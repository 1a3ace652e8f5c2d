"""What a library made is given back in threads, but not any more once the interpreter ends.

Contract: the destructor of such an object lets Python's lock go, and a thread other than the main one that wants it back while
the interpreter ends takes the whole process down. `give_back` keeps everything from that moment on.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable

#: How long the end waits for what is being given back at that moment.
_WAIT_S = 2.0


class _GivingBack:
    """For one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._ends = False
        self._kept: list[object] = []
        atexit.register(self.end)

    def give_back(self, take: Callable[[], object]) -> None:
        with self._changed:
            if self._ends:
                self._kept.append(take())
                return
            self._under_way += 1
        try:
            take()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.wait_for(lambda: not self._under_way, _WAIT_S)


_of_this_process = _GivingBack()


def never_give_back(thing: object) -> None:
    """Its destructor would wait for a call that does not end, now or when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def give_back(take: Callable[[], object]) -> None:
    """`take` returns the only reference to the object. Any thread."""
    _of_this_process.give_back(take)
