"""The two ways in which the bytes of a link travel: through its socket, or through memory that its two ends share.

Contract: as for a link, at most one thread reads and one writes; of a shared stream both are the same thread. Everything else may
be called from any thread. `close` comes once, when nobody reads, writes or asks any more.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from tmd_worker.native.library import LinkState
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.wire import HEADER_BYTES, STOP_FRAME

Buffer = bytes | bytearray | memoryview

#: Of a TCP connection (the kernel doubles it). It must stay below what the peer's kernel takes unread: left to grow, it closed
#: the peer's window again and again, and each time the transfer stood still until a delayed acknowledgement or a probe.
SEND_BUFFER_BYTES = 256 << 10
HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Stream:
    """All bytes go through the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.nearby = sock.family is socket.AF_UNIX
        if not self.nearby:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.sock = sock
        self.local = _address(sock.getsockname())
        try:
            self.remote = _address(sock.getpeername())
        except OSError:
            self.remote = ("", 0)  # gone already; whoever watches or reads it will find out
        #: Shared with the native core, which finds it at `address`.
        self.state = LinkState(fd=sock.fileno())
        self.address = ctypes.addressof(self.state)

    @property
    def kind(self) -> str:
        """As in TMD_LOCAL_LINKS."""
        return "unix" if self.nearby else "tcp"

    def limit_wait(self, timeout_s: float) -> None:
        """How long a read that waits does so (0: for ever)."""
        seconds = int(timeout_s)
        try:
            value = struct.pack("@qq", seconds, int((timeout_s - seconds) * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        except OSError:
            pass  # closed meanwhile; the next read says so

    def write(self, parts: Sequence[Buffer]) -> int:
        """What fits without waiting, in bytes. Raises BlockingIOError if nothing does, another OSError if it is over."""
        return self.sock.sendmsg(parts, (), _NO_WAIT)

    def read(self, into: memoryview, flags: int) -> int:
        """As recv_into: 0 at the end, BlockingIOError if there is nothing (now, or until the time was up)."""
        return self.sock.recv_into(into, len(into), flags)

    def hung_up(self) -> bool:
        """True if the peer has closed, whether or not something is left to read."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def say_stop(self) -> None:
        """The last words, if they can be said without waiting. Raises OSError. Nobody writes meanwhile."""
        if not self.state.unsent or self.state.unsent > HEADER_BYTES:  # else it would complete the frame that was broken off
            self.sock.send(STOP_FRAME, _NO_WAIT)

    def stop_said(self) -> bool:
        """True if the last that the peer sent is a STOP. Reads nothing away."""
        return self._waiting_unread().endswith(STOP_FRAME)

    def shut(self, how: int) -> None:
        """As a socket's shutdown: wakes whoever waits."""
        try:
            self.sock.shutdown(how)
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self.state.fd = -1
        self.sock.close()

    def close_copy(self) -> None:
        """In a forked child: without telling the peer."""
        self.state.fd = -1
        self.sock.close()

    def _waiting_unread(self) -> bytes:
        try:
            return self.sock.recv(8 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""


class SharedStream(Stream):
    """Frames go through memory. The socket carries bells for whoever sleeps, the STOP, which so never lacks room, and the end."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.sock)
        assert connection.segment is not None
        self._segment = connection.segment
        self._core = connection.segment.core
        self.state.shared = connection.segment.address

    @property
    def kind(self) -> str:
        return "shm"

    def write(self, parts: Sequence[Buffer]) -> int:
        written = 0
        for part in parts:
            if not len(part):
                continue
            place, _kept = _place_of(part)
            count = self._core.tmd_write(self.address, place, len(part))
            if count < 0 and (not written or count != -errno.EAGAIN):
                raise _error(-count)
            written += max(count, 0)
            if count < len(part):
                break
        return written

    def read(self, into: memoryview, flags: int) -> int:
        place, _kept = _place_of(into)
        count: int = self._core.tmd_read(self.address, place, len(into), flags)
        if count < 0:
            raise _error(-count)
        return count

    def wait(self, streams: Sequence[Stream], events: Sequence[int], timeout_s: float) -> list[int]:
        """See wait_for: in the native core, for it takes more than a look at sockets."""
        addresses = (ctypes.c_void_p * len(streams))(*[stream.address for stream in streams])
        places = (ctypes.c_short * len(streams))(*events)
        ready = self._core.tmd_wait(addresses, places, len(streams), math.ceil(timeout_s * 1000))
        if ready < 0:
            raise OSError("waiting for links failed")
        return list(places) if ready else []

    def say_stop(self) -> None:
        self.sock.send(STOP_FRAME, _NO_WAIT)

    def stop_said(self) -> bool:
        return bool(self.state.stopped) or STOP_FRAME in self._waiting_unread()

    def close(self) -> None:
        self.state.shared = None
        super().close()
        self._segment.release()

    def close_copy(self) -> None:
        self.state.shared = None
        super().close_copy()


def stream_of(connection: Connection) -> Stream:
    return Stream(connection.sock) if connection.segment is None else SharedStream(connection)


def wait_for(streams: Sequence[Stream], events: Sequence[int], timeout_s: float) -> list[int]:
    """As poll, with what each stream is waited for (POLLIN, POLLOUT, POLLRDHUP): what is there of each; nothing after the timeout
    (0: for ever). All streams differ."""
    for stream in streams:
        if isinstance(stream, SharedStream):
            return stream.wait(streams, events, timeout_s)
    poll = select.poll()
    for stream, wanted in zip(streams, events, strict=True):
        poll.register(stream.state.fd, wanted)
    found = dict(poll.poll(timeout_s * 1000 if timeout_s else None))
    return [found.get(stream.state.fd, 0) for stream in streams] if found else []


def why(code: int) -> str:
    """In words: an errno of the system's or the native core's."""
    return "its positions in the shared memory are impossible" if code == errno.EPROTO else os.strerror(code)


def _error(code: int) -> OSError:
    return OSError(code, why(code))


def _place_of(data: Buffer) -> tuple[int, object]:
    """Address of at least one byte, and what must be kept meanwhile."""
    view = memoryview(data)
    if view.readonly:
        view = memoryview(bytearray(view))
    first = ctypes.c_char.from_buffer(view)
    return ctypes.addressof(first), first


def _address(name: Any) -> tuple[str, int]:
    """Of one end, as the kernel tells it; the name of one in Linux's abstract namespace begins with a zero byte."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return f"@{name[1:].decode()}", 0
