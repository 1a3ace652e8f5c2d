"""The listening sockets of a process, for everybody and for its own host: each connection goes through the handshake.

Contract: one thread, which nobody can block. A connection that says nothing, garbage or too much costs a descriptor for at most
HANDSHAKE_S; if too many are half open the oldest goes. What passes is handed to `accept`, which must not block.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable

import msgspec

from tmd_worker.transport import handshake, network
from tmd_worker.transport.closing import Closing
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.handshake import Hello, Verdict
from tmd_worker.transport.segment import Segment

HANDSHAKE_S = 5.0
MAX_HALF_OPEN = 256
_BACKLOG = 512
#: The kernel goes on announcing a connection that cannot be accepted.
_OUT_OF_DESCRIPTORS_S = 0.01

_log = logging.getLogger(__name__)


class CannotListen(OSError):
    """This process has no port, so nobody can open a link to it; the text says what to do."""


class _HalfOpen:
    """A connection that has been greeted and has not proven itself yet."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.greeted = handshake.greeting()
        self._received = bytearray()
        #: Of the memory that came along, if any did.
        self._descriptor = -1
        sock.setblocking(False)
        if sock.family is not socket.AF_UNIX:
            network.prepare(sock)
        sock.send(self.greeted)

    def read(self, key: bytes) -> Hello | None:
        """The hello once it is complete. Raises HandshakeRefused or OSError."""
        while True:
            missing = self._missing()
            if not missing:
                break
            try:
                data = self._receive(missing)
            except BlockingIOError:
                return None
            if not data:
                raise handshake.HandshakeRefused("closed before its hello was complete")
            self._received += data
        prefix = handshake.LENGTH.size
        body = bytes(self._received[prefix : -handshake.MAC_BYTES])
        return handshake.open_hello(key, self.greeted, body, bytes(self._received[-handshake.MAC_BYTES :]))

    def map(self, hello: Hello) -> Segment | None:
        """The memory that came along with this hello, if it can be used."""
        if not hello.ring_bytes or self._descriptor < 0:
            return None
        return Segment.attach(self._descriptor, hello.ring_bytes)

    def forget_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        self.forget_descriptor()
        self.sock.close()

    def _receive(self, size: int) -> bytes:
        if self.sock.family is not socket.AF_UNIX:
            return self.sock.recv(size)
        data, descriptors, _, _ = socket.recv_fds(self.sock, size, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            self.forget_descriptor()  # a stranger may send many
            self._descriptor = descriptor
        return data

    def _missing(self) -> int:
        prefix = handshake.LENGTH.size
        if len(self._received) < prefix:
            return prefix - len(self._received)
        whole = prefix + handshake.body_bytes(self._received[:prefix]) + handshake.MAC_BYTES
        return whole - len(self._received)


class Listener:
    """See the module's contract."""

    def __init__(
        self,
        host: str,
        port_range: tuple[int, int] | None,
        key: bytes,
        judge: Callable[[Hello], Verdict],
        accept: Callable[[Connection, Hello], None],
        *,
        shares: bool,
    ) -> None:
        """`host`: a numeric address of this machine. `judge` decides about an authentic hello; `accept` gets the connection
        (its socket blocks) of what it said ok to. `shares`: memory that is offered is taken. Raises CannotListen."""
        remote = _bind(host, port_range)
        self.host: str = host
        self.port: int = remote.getsockname()[1]
        nearby = _bind_nearby(handshake.nearby_name(key, host, self.port))
        #: By descriptor.
        self._listening = {sock.fileno(): sock for sock in (remote, nearby) if sock is not None}
        self._key = key
        self._judge = judge
        self._accept = accept
        self._shares = shares
        self._half_open: dict[int, _HalfOpen] = {}
        self._told = False
        self._closing = Closing()
        self._epoll = select.epoll()
        for fd in (*self._listening, self._closing.fd):
            self._epoll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """The thread's body; ends after close()."""
        while not self._closing.wanted:
            for fd, _ in self._epoll.poll(HANDSHAKE_S if self._half_open else None):
                if fd in self._listening:
                    self._greet_all(self._listening[fd])
                elif fd in self._half_open:
                    self._read(fd)
            self._drop_late()
        for fd in list(self._half_open):
            self._drop(fd)
        self._epoll.close()
        for sock in self._listening.values():
            sock.close()
        self._closing.end()

    def close(self) -> None:
        """Ends the thread, which closes the sockets."""
        self._closing.ask()

    def close_copy(self) -> None:
        """In a forked child, which has no such thread: closes the inherited descriptors."""
        for sock in self._listening.values():
            sock.close()
        self._epoll.close()
        for half_open in self._half_open.values():
            half_open.close()

    def _greet_all(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._tell(error)
                time.sleep(_OUT_OF_DESCRIPTORS_S)  # or the peer gave up: whoever means it tries again
                return
            if sock.family is socket.AF_UNIX and not network.is_same_user(sock):
                # To close what another user sends along may block.
                sock.close()
                continue
            if len(self._half_open) >= MAX_HALF_OPEN:
                self._drop(next(iter(self._half_open)))
            try:
                half_open = _HalfOpen(sock, time.monotonic() + HANDSHAKE_S)
                self._epoll.register(sock, select.EPOLLIN)
            except OSError:
                sock.close()
                continue
            self._half_open[sock.fileno()] = half_open

    def _tell(self, error: OSError) -> None:
        """Once: who connects only sees that nobody answers."""
        if error.errno in (errno.EMFILE, errno.ENFILE) and not self._told:
            self._told = True
            _log.warning("this rank cannot take connections (%s): its peers wait; %s", error.strerror, network.DESCRIPTORS_HINT)

    def _read(self, fd: int) -> None:
        half_open = self._half_open[fd]
        try:
            hello = half_open.read(self._key)
        except (handshake.HandshakeRefused, OSError):
            self._drop(fd)  # without a word: a stranger learns nothing
            return
        if hello is None:
            return
        self._epoll.unregister(fd)
        del self._half_open[fd]
        connection = self._answer(half_open, hello)
        if connection is not None:
            self._accept(connection, hello)

    def _answer(self, half_open: _HalfOpen, hello: Hello) -> Connection | None:
        """The connection if it is wanted and the dialer has been told so."""
        verdict = self._judge(hello)
        connection = Connection(half_open.sock)
        if verdict.answer == "ok" and self._shares:
            connection.segment = half_open.map(hello)
            verdict = msgspec.structs.replace(verdict, shared=connection.segment is not None)
        half_open.forget_descriptor()
        try:
            connection.sock.send(handshake.seal_verdict(self._key, half_open.greeted, hello, verdict))
            connection.sock.setblocking(True)
        except OSError:
            connection.close()
            return None
        if verdict.answer != "ok":
            connection.close()
            return None
        return connection

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for fd in [fd for fd, half_open in self._half_open.items() if half_open.deadline_s < now_s]:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._half_open.pop(fd).close()


def _bind(host: str, port_range: tuple[int, int] | None) -> socket.socket:
    """Listens on the first free port of the range, or on any. Raises CannotListen."""
    first, last = port_range if port_range is not None else (0, 0)
    refused_by: OSError
    for port in range(first, last + 1):
        sock = socket.socket(network.family(host), socket.SOCK_STREAM)
        try:
            if port:  # one that was used a moment ago is free, also while the kernel still remembers its connections
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            refused_by = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
            continue
        return sock
    raise CannotListen(_cannot_listen(host, port_range, refused_by))


def _cannot_listen(host: str, port_range: tuple[int, int] | None, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE and port_range is not None:
        return (
            f"no port of {port_range[0]}-{port_range[1]} on {host} is free for this rank ({error.strerror}); give tmd-run a "
            f"wider --port-range: a port for each rank of the node, and some for processes that are just being replaced"
        )
    if error.errno == errno.EACCES and port_range is not None:
        return (
            f"no port of {port_range[0]}-{port_range[1]} on {host} may be used by this user ({error.strerror}); give tmd-run a "
            f"--port-range above 1023"
        )
    return f"this rank cannot listen on {host} ({error.strerror}); tmd-run --host or --interface chooses another address"


def _bind_nearby(name: bytes) -> socket.socket | None:
    """None if the name cannot be had: then processes of this host come the same way as all others."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock
