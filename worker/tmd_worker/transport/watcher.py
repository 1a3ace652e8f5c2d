"""Notices within milliseconds that a peer hung up, also while this process only computes.

One thread for all links. A link that somebody is reading is left to the reader for a moment, so that what lies in front of
the end (the result of a vote) is still read.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from tmd_worker.transport.closing import Closing
from tmd_worker.transport.link import Link

#: How long a reader has for what is in front of the end of a link.
GRACE_S = 0.003
_STEP_S = 0.001


class Watcher:
    """Calls `ended(link, orderly)` once per link that hung up while it was watched."""

    def __init__(self, ended: Callable[[Link, bool], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._epoll = select.epoll()
        self._closing = Closing()
        self._epoll.register(self._closing.fd, select.EPOLLIN)

    def add(self, link: Link) -> None:
        """From now on, also if it has hung up already."""
        with self._lock:
            if link.ending:
                return  # `remove` has come before, and its descriptor may be another link's by now
            self._links[link.fd] = link
            try:
                self._epoll.register(link.fd, select.EPOLLRDHUP)
            except FileExistsError:
                self._epoll.modify(link.fd, select.EPOLLRDHUP)
            except (OSError, ValueError):
                del self._links[link.fd]  # this side has closed it meanwhile, or the watcher itself

    def remove(self, link: Link) -> None:
        """Before its descriptor is closed."""
        with self._lock:
            if self._links.get(link.fd) is link:
                del self._links[link.fd]
                self._unregister(link.fd)

    def run(self) -> None:
        """The thread's body; ends after close()."""
        left_to_reader: dict[Link, float] = {}
        while not self._closing.wanted:
            for fd, _ in self._epoll.poll(_STEP_S if left_to_reader else None):
                link = self._take(fd)
                if link is not None:
                    left_to_reader[link] = time.monotonic() + GRACE_S
            now_s = time.monotonic()
            for link, deadline_s in list(left_to_reader.items()):
                if link.ending or link.ignored:
                    del left_to_reader[link]
                elif not link.held or now_s > deadline_s:
                    del left_to_reader[link]
                    self._ended(link, link.ends_in_order())
        self._epoll.close()
        self._closing.end()

    def close(self) -> None:
        self._closing.ask()

    def close_copy(self) -> None:
        """In a forked child, which has no such thread."""
        self._epoll.close()

    def _take(self, fd: int) -> Link | None:
        """The link behind an event, which is then watched no more; None if the number belongs to another one by now."""
        with self._lock:
            link = self._links.get(fd)
            if link is None or not link.hung_up():
                return None
            del self._links[fd]
            self._unregister(fd)
            return link

    def _unregister(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except (OSError, ValueError):
            pass  # closed meanwhile, which unregisters too; or the watcher itself is, because the process ends
