"""How a thread that waits in epoll is told to end."""

from __future__ import annotations

import os


class Closing:
    """The thread watches `fd`, looks at `wanted` whenever it wakes up, and calls `end` last."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wanted = False

    def ask(self) -> None:
        """From any thread, any number of times."""
        if not self.wanted:
            os.eventfd_write(self.fd, 1)
            self.wanted = True  # only now: the thread closes the counter as soon as it sees this

    def end(self) -> None:
        os.close(self.fd)
