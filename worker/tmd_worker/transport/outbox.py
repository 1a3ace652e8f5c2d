"""What one member sends to another, message by message, in the order of the calls.

Contract: whoever sends is not held up. What the link has room for leaves in the caller's thread, which saves two changes of
thread, most of the time of a small message; the rest, and what comes behind it, leaves in a thread of the outbox. Every operation
ends.
"""

from __future__ import annotations

import collections
import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tmd_worker.transport import native
from tmd_worker.transport.dialing import LinkError
from tmd_worker.transport.exchange import frames
from tmd_worker.transport.group import Guard, execute
from tmd_worker.transport.link import Link
from tmd_worker.transport.tensors import byte_view, flat
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind
from tmd_worker.transport.work import Operation

#: In front of every message: tag, size.
PREFIX = struct.Struct("!qQ")


class OutboxHost(Guard, Protocol):
    """What an outbox needs of the fabric."""

    def opening_failed(self, epoch: int, error: LinkError) -> None:
        """Tells the runtime that a link of this epoch could not be opened, unless the epoch is over."""


class Outgoing:
    """A message on its way. How far it has come is in memory that the native core writes, so that another thread can go on."""

    def __init__(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        self.operation = operation
        self.data = flat(tensor)
        self.prefix = PREFIX.pack(tag, self.data.nbytes)
        #: In which it was sent; -1 before.
        self.epoch = -1
        #: How many frames are out, the prefix among them.
        self.frames = ctypes.c_uint64()

    @property
    def begun(self) -> bool:
        return self.epoch >= 0

    def is_out(self) -> bool:
        return self.frames.value == 1 + -(-self.data.nbytes // MAX_PAYLOAD_BYTES)


class _NoRoom(Exception):
    """The rest of a message has to wait."""


class Outbox:
    """For one peer. `opened` yields the link, and may block until the peer wants to talk too; `link` yields it if it is open."""

    def __init__(
        self,
        host: OutboxHost,
        name: str,
        epoch: Callable[[], int],
        opened: Callable[[], Link],
        link: Callable[[], Link | None],
    ) -> None:
        self._host = host
        self._name = name
        self._epoch = epoch
        self._opened = opened
        self._link = link
        self._changed = threading.Condition()
        self._messages: collections.deque[Outgoing] = collections.deque()
        #: A thread is sending the first one.
        self._busy = False
        self._running = False
        self._over = False

    def send(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        message = Outgoing(operation, tensor, tag)
        with self._changed:
            here = not self._messages and self._link() is not None
            self._messages.append(message)
            if here:
                self._busy = True
            else:
                self._wake()
        if here:
            self._begin(message)

    def finish(self, wait_s: float) -> None:
        """Nothing more is to be sent: waits until the rest is out, or for so long."""
        self.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._messages, wait_s)

    def end(self) -> None:
        """The thread ends once all is out, or the link is closed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # ---------------------------------------------------------------- in the caller's thread

    def _begin(self, message: Outgoing) -> None:
        """Whatever gets out of here (a signal's handler may raise): the thread goes on from where it was."""
        ended = False
        try:
            self._run_one(message, waits=False)
            ended = True
        except _NoRoom:
            pass
        finally:
            with self._changed:
                self._busy = False
                if ended:
                    self._messages.popleft()
                if self._messages:
                    self._wake()
                elif self._over:
                    self._changed.notify_all()

    # ---------------------------------------------------------------- in the outbox's thread

    def _wake(self) -> None:
        """There is something for the thread."""
        if not self._running:
            self._running = True
            self._host.spawn(f"send-{self._name}", self._run)
        self._changed.notify_all()

    def _run(self) -> None:
        while (message := self._next()) is not None:
            if not message.operation.work.is_completed():
                self._run_one(message, waits=True)
            with self._changed:
                self._busy = False
                self._messages.popleft()
                self._changed.notify_all()

    def _next(self) -> Outgoing | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (self._messages or self._over))
            self._busy = self._running = bool(self._messages)
            return self._messages[0] if self._messages else None

    # ---------------------------------------------------------------- in either

    def _run_one(self, message: Outgoing, *, waits: bool) -> None:
        """Raises _NoRoom unless it waits."""
        execute(self._host, message.operation, self._epoch(), lambda: self._send(message, waits=waits))

    def _send(self, message: Outgoing, *, waits: bool) -> None:
        try:
            link = self._opened()
        except LinkError as error:
            self._host.opening_failed(self._epoch(), error)
            raise
        if not message.begun:
            message.epoch = link.epoch
        out = native.send_message(link, message, waits=waits)
        if out is None and waits:
            link.send(Kind.MESSAGE, message.epoch, message.prefix)
            for frame in frames(byte_view(message.data)):
                link.send(Kind.DATA, message.epoch, frame)
        elif not out:
            raise _NoRoom
