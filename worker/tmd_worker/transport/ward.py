"""The link from the ward, and who reads it.

Contract: every message is read whole and kept, in order, by a thread of this link's own or, while messages are small, by the
thread that waits for one anyway: to wake the reader for each would cost more than all else that a step has to do here. Whatever
is not a small message that lies there as a whole is the reader's: it alone judges what is refused and the end of the link.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tmd_worker.transport import native
from tmd_worker.transport.group import Guard
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.wire import HEADER, HEADER_BYTES, MAGIC, Kind

#: In front of every record or tail: step, size of all that follows (over several frames).
PREFIX = struct.Struct("!qQ")
MAX_RECORD_BYTES = 256 << 20
#: A message of this size fits into the socket, so its sender goes on although nobody reads it yet.
SMALL_BYTES = 16 << 10
#: How often a reader that has lent the link looks whether something has been lying there since it looked last.
LOOK_S = 0.05
_KINDS = (Kind.RECORD, Kind.TAIL)


class Message(NamedTuple):
    """What the ward said about one step."""

    kind: Kind
    epoch: int
    step: int
    payload: bytes


class Wake:
    """Ends the wait of one thread on a descriptor, if it waits."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._waiting = self._closed = False

    def __enter__(self) -> Wake:
        """Before the waits of that thread."""
        with self._lock:
            self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._waiting = False
            if self._closed:
                os.close(self.fd)

    def ring(self) -> None:
        """From any thread. What the wait is to find must be so before."""
        with self._lock:
            if self._waiting and not self._closed:
                os.eventfd_write(self.fd, 1)

    def heard(self) -> None:
        """After a wait that it may have ended."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # the time was up

    def close(self) -> None:
        """Rings for the last time. Nobody begins to wait any more."""
        self.ring()
        with self._lock:
            if not self._waiting and not self._closed:
                os.close(self.fd)
            self._closed = True


class WardLink:
    """See the module's contract."""

    def __init__(
        self, link: Link, guard: Guard, wake: Wake, *, keep: Callable[[Message], None], lends: Callable[[], None]
    ) -> None:
        """`keep` is called for each message, by whichever thread has read it; `wake` ends the wait in `receive`; the reader
        calls `lends` once `receive` may be called."""
        self.link = link
        self._opened_in = link.epoch
        self._guard = guard
        self._wake = wake
        self._keep = keep
        self._lends = lends
        self._turn = threading.Condition()
        #: The reader has stepped aside; the thread that waits reads now; the reader is to come back; nobody is to lend any more.
        self._lent = self._borrowed = self._recalled = self._ended = False
        self._was_small = False
        self._seen = memoryview(bytearray(2 * (HEADER_BYTES + PREFIX.size + SMALL_BYTES)))
        self._either = select.poll()
        self._either.register(link.fd, select.POLLIN)
        self._either.register(wake.fd, select.POLLIN)

    # ---------------------------------------------------------------- the thread that waits

    @property
    def lent(self) -> bool:
        """The reader has stepped aside: `receive` reads."""
        return self._lent and not self._recalled

    def receive(self, timeout_s: float, enough: Callable[[], bool]) -> bool:
        """Waits for small messages and keeps those that are there. False: the reader has the link, wait for what it keeps.

        `enough`: asked once the reader cannot read any more: it may have done so since the caller looked last.
        """
        try:  # an exception out of a signal's handler may come anywhere, and the reader waits while the link is borrowed
            with self._turn:
                if not self.lent:
                    return False
                self._borrowed = True
            if enough():
                return True
            taken_bytes, small = native.hear_ward(self.link, self._wake.fd, self._seen, self._opened_in, timeout_s) or self._hear(
                timeout_s
            )
            for message in _messages(self._seen[:taken_bytes]):
                self._keep(message)
            if not small:
                self.recall()
            elif not taken_bytes:
                self._wake.heard()
        finally:
            with self._turn:
                self._borrowed = False
                if self._recalled:
                    self._turn.notify_all()
        return True

    def _hear(self, timeout_s: float) -> tuple[int, bool]:
        """As native.hear_ward."""
        if self.link.fd not in [fd for fd, _ in self._either.poll(timeout_s * 1000)]:
            return 0, True
        there = self._seen[: self.link.peek(self._seen)]
        taken_bytes = frames = 0
        while (size := self._whole_message(there[taken_bytes:], frames)) > 0:
            taken_bytes += size
            frames += 1
        self.link.take(there[:taken_bytes], frames)
        return taken_bytes, frames > 0

    def _whole_message(self, there: memoryview, number: int) -> int:
        """The size of the message that `there` begins with, if it is whole, small, and the link's next but `number`; else 0."""
        if len(there) < HEADER_BYTES + PREFIX.size:
            return 0
        magic, kind, epoch, sequence, size = HEADER.unpack_from(there)
        if magic != MAGIC or kind not in _KINDS or sequence != self.link.state.received + number or epoch < self._opened_in:
            return 0
        whole = size == PREFIX.size + PREFIX.unpack_from(there, HEADER_BYTES)[1] and HEADER_BYTES + size <= len(there)
        return HEADER_BYTES + size if whole else 0

    def recall(self) -> None:
        """The reader goes on, until it has read what is there."""
        with self._turn:
            self._recalled = True
            self._turn.notify_all()

    def end_lending(self) -> None:
        """The reader reads this link to its end. Whoever is in `receive` has to be woken."""
        with self._turn:
            self._ended = True
        self.recall()

    def behind(self) -> bool:
        """Something small that the ward has sent may not have been kept yet; if so the reader is on it."""
        if not self._was_small or (self.lent and not self._unread()):
            return False
        self.recall()
        return True

    def _unread(self) -> bool:
        """Something has come, or the end. From any thread."""
        look = select.poll()
        look.register(self.link.fd, select.POLLIN)
        return bool(look.poll(0))

    # ---------------------------------------------------------------- the reader

    def read(self) -> None:
        """The body of the reader's thread, for which the link is held: until the link has ended."""
        try:
            while True:
                self._lend()
                message = self._read_message()
                if message.epoch < self._opened_in:
                    raise LinkEnded(self.link, f"sent a record of epoch {message.epoch} on a link of epoch {self._opened_in}")
                self._was_small = len(message.payload) <= SMALL_BYTES
                self._keep(message)
        except LinkEnded as ended:
            self._guard.link_ended(self.link, str(ended), orderly=ended.orderly)

    def _lend(self) -> None:
        """Steps aside while messages are small, until there is something that nobody else reads."""
        if not self._was_small or self._ended or self._unread():
            return
        with self._turn:
            self._lent, self._recalled = True, self._ended
        self._lends()
        with self._turn:
            lay_there = False
            while not self._recalled:
                lies_there = not self._borrowed and self._unread()
                if lay_there and lies_there:
                    break
                lay_there = lies_there
                self._turn.wait(LOOK_S)
            self._recalled = True
            while self._borrowed:  # not for long: something is there to be read, or `wake` rings
                self._turn.wait()
            self._lent = False

    def _read_message(self) -> Message:
        link = self.link
        kind, epoch, _, size = link.receive_header()
        if kind not in _KINDS or size < PREFIX.size:
            raise LinkEnded(link, f"sent a {kind.name} frame of {size} bytes where records are sent")
        first = bytearray(size)
        link.read_payload(memoryview(first))
        step, total = PREFIX.unpack_from(first)
        got = size - PREFIX.size
        if got > total or total > MAX_RECORD_BYTES:
            raise LinkEnded(link, f"announced a record of {total} bytes, the limit is {MAX_RECORD_BYTES}")
        if got == total:
            return Message(kind, epoch, step, bytes(memoryview(first)[PREFIX.size :]))
        payload = bytearray(total)
        view = memoryview(payload)
        view[:got] = memoryview(first)[PREFIX.size :]
        while got < total:
            next_kind, next_epoch, _, size = link.receive_header()
            if (next_kind, next_epoch) != (kind, epoch) or not 0 < size <= total - got:
                raise LinkEnded(link, "broke off a record in its middle")
            link.read_payload(view[got : got + size])
            got += size
        return Message(kind, epoch, step, bytes(payload))


def _messages(taken: memoryview) -> Iterator[Message]:
    """Whole messages, each in one frame."""
    while taken:
        _, kind, epoch, _, size = HEADER.unpack_from(taken)
        step, _ = PREFIX.unpack_from(taken, HEADER_BYTES)
        end = HEADER_BYTES + size
        yield Message(Kind(kind), epoch, step, bytes(taken[HEADER_BYTES + PREFIX.size : end]))
        taken = taken[end:]
