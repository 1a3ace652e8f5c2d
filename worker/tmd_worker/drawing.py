"""One state drawn from several sources at once: a thread for each, and the word that it is in place, or why it is not.

Contract: `result` returns as soon as the state is in place, whatever the other threads are at: they may still dial a source that
does not answer, but they touch nothing any more. `close` stops those and waits for them. Each thread is bound by the deadlines of
what it does.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from threading import Thread

from tmd_worker.fetching import Fetch
from tmd_worker.state.errors import StateError, TransferBroken
from tmd_worker.state.receiving import Origin, Received
from tmd_worker.threads import start_thread

_log = logging.getLogger(__name__)

#: What a thread does with its source: everything that it opens, it opens with `Fetch.using`. Raises StateError or OSError.
Draw = Callable[[Fetch], Received]


class Drawing:
    """See the module's contract."""

    def __init__(self, end_timeout_s: float) -> None:
        """`end_timeout_s`: for each thread, in `close`."""
        self._end_timeout_s = end_timeout_s
        self._using = Fetch((), end_timeout_s)
        self._threads: list[Thread] = []
        self._ends: queue.SimpleQueue[tuple[Origin, Received | Exception]] = queue.SimpleQueue()

    def start(self, origin: Origin, draw: Draw) -> None:
        """In a thread of its own."""
        self._threads.append(start_thread(f"draw-{origin.rank}", lambda: self._run(origin, draw)))

    def _run(self, origin: Origin, draw: Draw) -> None:
        try:
            self._ends.put((origin, draw(self._using)))
        except (StateError, OSError) as error:
            self._ends.put((origin, error))

    def result(self) -> Received:
        """Of all that were started. Raises the only source's error, or TransferBroken with what each says."""
        failed: list[tuple[Origin, Exception]] = []
        for _ in self._threads:
            origin, end = self._ends.get()
            if isinstance(end, Received):
                return end
            failed.append((origin, end))
        if len(failed) == 1:
            raise failed[0][1]
        said = "; ".join(f"{origin}: {error}" for origin, error in failed)
        raise TransferBroken(f"no source could hand the state over: {said}")

    def stop(self) -> None:
        """Closes what the threads use."""
        self._using.stop()

    def close(self) -> None:
        """Returns when no thread is left, or none that could be waited for any longer: those that are left read nothing."""
        self.stop()
        for thread in self._threads:
            thread.join(self._end_timeout_s)
            if thread.is_alive():
                _log.error("%s did not end in %g s after it was stopped", thread.name, self._end_timeout_s)
