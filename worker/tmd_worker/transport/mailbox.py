"""Which message belongs to which receive, in one group. Knows no links, and may be used from any thread.

Messages of one sender with one tag are received in the order in which they were sent; of the receives that fit a message the
one that was called first takes it. What comes before its receive is kept, within bounds.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport.work import Operation

#: Messages kept for later receives, of all senders and tags together.
MAX_KEPT_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Receive:
    """A receive that was called. `source`: the sender's group rank, None: any."""

    operation: Operation
    tensor: Tensor
    tag: int
    source: int | None
    #: A moment of time.monotonic().
    deadline_s: float

    def fits(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (None, source)


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One that has come before its receive."""

    source: int
    tag: int
    data: bytearray


class MailboxFull(Exception):
    """More than MAX_KEPT_BYTES are waiting for receives that nobody has called."""


class MailboxClosed(Exception):
    """Nothing can be received in this epoch any more."""


class Mailbox:
    """See the module's contract. `senders`: the group ranks of all others."""

    def __init__(self, senders: frozenset[int]) -> None:
        self._senders = senders
        self._changed = threading.Condition()
        self._posted: list[Receive] = []
        self._kept: list[Message] = []
        self._kept_bytes = 0
        #: Senders from whom nothing can come any more; a receive from any sender does without them.
        self._lost: set[int] = set()
        self._closed = False

    def post(self, receive: Receive) -> Message | None:
        """The message that was kept for this receive, or None: then it waits for one. Raises MailboxClosed."""
        with self._changed:
            if self._closed:
                raise MailboxClosed
            for message in self._kept:
                if receive.fits(message.source, message.tag):
                    self._kept.remove(message)
                    self._kept_bytes -= len(message.data)
                    return message
            if receive.source is None:
                self._lost.clear()  # whoever reads from them finds out again
            self._posted.append(receive)
            self._changed.notify_all()
            return None

    def claim(self, source: int, tag: int) -> Receive | None:
        """The receive that this message is for; it waits no more."""
        with self._changed:
            return self._claim(source, tag)

    def _claim(self, source: int, tag: int) -> Receive | None:
        for receive in self._posted:
            if receive.fits(source, tag):
                self._posted.remove(receive)
                return receive
        return None

    def keep(self, message: Message) -> Receive | None:
        """Keeps a message that nobody waited for; if somebody does by now, returns that receive instead."""
        with self._changed:
            receive = self._claim(message.source, message.tag)
            if receive is None:
                self._kept.append(message)
                self._kept_bytes += len(message.data)
            return receive

    def reserve(self, size_bytes: int) -> None:
        """Before reading a message that is to be kept. Raises MailboxFull."""
        with self._changed:
            if self._kept_bytes + size_bytes > MAX_KEPT_BYTES:
                raise MailboxFull(f"sent more than {MAX_KEPT_BYTES} bytes with tags that nobody receives")

    # ---------------------------------------------------------------- for those who read from a sender

    def deadline(self, source: int) -> float | None:
        """Until when somebody waits for a message of this sender (time.monotonic()); None: nobody does."""
        with self._changed:
            wanting = [receive.deadline_s for receive in self._posted if self._wants(receive, source)]
            return min(wanting, default=None)

    def wait_wanted(self, source: int) -> bool:
        """Returns once somebody waits for a message of this sender; False if the mailbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._wants(receive, source) for receive in self._posted))
            return not self._closed

    def _wants(self, receive: Receive, source: int) -> bool:
        return receive.source == source or (receive.source is None and source not in self._lost)

    # ---------------------------------------------------------------- receives that come to nothing

    def expire(self, source: int | None) -> list[Receive]:
        """Takes out the receives of exactly this source whose deadline is over."""
        now_s = time.monotonic()
        return self._take(lambda receive: receive.source == source and receive.deadline_s <= now_s)

    def lose(self, source: int) -> list[Receive]:
        """Nothing comes from this sender any more. Takes out the receives that cannot be satisfied."""
        with self._changed:
            self._lost.add(source)
            hopeless = {source, None} if self._lost >= self._senders else {source}
            return self._take(lambda receive: receive.source in hopeless)

    def withdraw(self, work: Work) -> list[Receive]:
        """Takes out the receive with this work, if it still waits."""
        return self._take(lambda receive: receive.operation.work is work)

    def leave_out(self, sources: frozenset[int]) -> list[Receive]:
        """These ranks get new holders: takes out what waits for the old ones, or for anybody, and forgets what those sent."""
        with self._changed:
            self._lost -= sources
            self._kept = [message for message in self._kept if message.source not in sources]
            self._kept_bytes = sum(len(message.data) for message in self._kept)
            return self._take(lambda receive: receive.source is None or receive.source in sources)

    def close(self) -> list[Receive]:
        """Takes out all; whoever waits to read is told that it is over."""
        with self._changed:
            self._closed = True
            self._kept, self._kept_bytes = [], 0
            self._changed.notify_all()
            return self._take(lambda _: True)

    def _take(self, doomed: Callable[[Receive], bool]) -> list[Receive]:
        with self._changed:
            taken = [receive for receive in self._posted if doomed(receive)]
            self._posted = [receive for receive in self._posted if not doomed(receive)]
            return taken


def deadline_after(timeout_s: float) -> float:
    """0 means for ever, as for a link."""
    return time.monotonic() + timeout_s if timeout_s else math.inf
