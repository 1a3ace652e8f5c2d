"""Fetches of a state into this process, one at a time: the next one stops the one before and waits until it has ended.

Contract: between `take_over` and the end of `run` no other fetch connects, reads or writes. Without that, a read that stalled in
an epoch called off could go on later and write into parameters that are in use again. Each wait is bounded.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tmd_worker.state.errors import TransferBroken

Closer = Callable[[], None]


class Fetches:
    """Of one process, in the order in which they were asked for."""

    def __init__(self, end_timeout_s: float) -> None:
        """`end_timeout_s`: for one that was stopped."""
        self._end_timeout_s = end_timeout_s
        self._lock = threading.Lock()
        self._unended: list[Fetch] = []

    def next(self) -> Fetch:
        with self._lock:
            earlier = [fetch for fetch in self._unended if not fetch.ended]
            fetch = Fetch(earlier, self._end_timeout_s)
            self._unended = [*earlier, fetch]
            return fetch


class Fetch:
    """One of them. `stop` may come from any thread, the rest from its own."""

    def __init__(self, earlier: Sequence[Fetch], end_timeout_s: float) -> None:
        self._earlier = earlier
        self._end_timeout_s = end_timeout_s
        self._lock = threading.Lock()
        self._closers: list[Closer] = []
        self._stopped = False
        self._ended = threading.Event()

    def run(self, body: Callable[[], None]) -> None:
        """All that this fetch does."""
        try:
            body()
        finally:
            self._earlier = ()
            self._ended.set()

    def take_over(self) -> None:
        """Returns once no earlier fetch is under way. Raises TransferBroken if one does not end."""
        deadline_s = time.monotonic() + self._end_timeout_s
        for fetch in self._earlier:
            fetch.stop()
        for fetch in self._earlier:
            if not fetch._ended.wait(max(deadline_s - time.monotonic(), 0.0)):
                raise TransferBroken(
                    f"an earlier fetch of the state was stopped and did not end in {self._end_timeout_s:g} s; nothing may be "
                    "written before that"
                )

    @contextlib.contextmanager
    def using(self, close: Closer) -> Iterator[None]:
        """`stop` closes this while the block runs. Raises TransferBroken if it was stopped already."""
        with self._lock:
            if self._stopped:
                raise TransferBroken("this fetch of the state was stopped: a later one has taken its place")
            self._closers.append(close)
        try:
            yield
        finally:
            with self._lock:
                if close in self._closers:
                    self._closers.remove(close)

    def stop(self) -> None:
        """Closes what it uses, so that it ends soon."""
        with self._lock:
            self._stopped = True
            closers, self._closers = self._closers, []
        for close in closers:
            close()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()


def hang_up(sock: socket.socket) -> None:
    """Wakes whoever uses it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed already
