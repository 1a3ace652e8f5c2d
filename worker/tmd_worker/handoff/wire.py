"""Bytes over one socket by a deadline, with few system calls, straight from and into memory.

Contract: one thread sends and one receives; `shut` may come from any other and wakes both. All trouble is an OSError with a text
for people. The kernel itself waits until a whole chunk is there (MSG_WAITALL, SO_RCVTIMEO), so a chunk costs a call or two and
the interpreter's lock is free meanwhile; over TLS it is a call for each record.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from tmd_worker.handoff.transfer import Memory

_TIMEVAL = struct.Struct("@ll")
#: How often a thread that waits in the kernel looks at its deadline; an error may come so much later than it.
LOOK_S = 0.25
#: Per call over TLS, so that the deadline is looked at in time.
_TLS_BYTES = 1 << 18


def view_of(memory: Memory) -> memoryview:
    """Its bytes, writable, without a copy. They must stay where they are for as long as the view is used."""
    if not memory.size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * memory.size_bytes).from_address(memory.address)).cast("B")


class Wire:
    """See the module's contract. Takes the socket over."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._shut = False
        self._plain = not isinstance(sock, ssl.SSLSocket)
        sock.settimeout(None if self._plain else LOOK_S)
        if self._plain:
            seconds = int(LOOK_S)
            patience = _TIMEVAL.pack(seconds, round((LOOK_S - seconds) * 1_000_000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def send(self, views: Sequence[memoryview], deadline_s: float) -> None:
        """All of them. `deadline_s`: a moment of time.monotonic()."""
        left = [view for view in views if len(view)]
        while left:
            try:
                moved = self._sock.sendmsg(left) if self._plain else self._sock.send(left[0][:_TLS_BYTES])
            except (BlockingIOError, TimeoutError):
                moved = 0
            left = _after(left, moved)
            self._look(deadline_s, left, "took")

    def receive(self, views: Sequence[memoryview], deadline_s: float) -> None:
        """Fills all of them. `deadline_s` may be math.inf: until `shut`."""
        left = [view for view in views if len(view)]
        while left:
            try:
                moved = self._receive_some(left)
            except (BlockingIOError, TimeoutError):
                self._look(deadline_s, left, "sent")
                continue
            if not moved:
                raise ConnectionError("the connection was closed" if self._shut else "the peer closed the connection")
            left = _after(left, moved)
            self._look(deadline_s, left, "sent")

    def _receive_some(self, left: list[memoryview]) -> int:
        return self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0] if self._plain else self._sock.recv_into(left[0])

    def shut(self) -> None:
        """Both directions, at once."""
        self._shut = True
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS's own would take its state away from the thread that reads
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        """Once no thread uses it any more."""
        self.shut()
        self._sock.close()

    def _look(self, deadline_s: float, left: list[memoryview], verb: str) -> None:
        if self._shut:
            raise ConnectionError("the connection was closed")
        if left and time.monotonic() > deadline_s:
            missing = sum(len(view) for view in left)
            raise TimeoutError(f"the peer {verb} too little in time: {missing} bytes of this chunk are missing")


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left once `moved` bytes of `views` are done."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
