"""The dialer's side of the handshake, over a real socket, with a deadline."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

import msgspec

from tmd.protocol.membership import Member
from tmd_worker.transport import handshake, network
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.handshake import Hello, Verdict
from tmd_worker.transport.segment import RING_BYTES, Offer


class LinkError(ConnectionError):
    """Links could not be opened; the text names the peer and why. `peer`: its global rank, where there is one."""

    def __init__(self, reason: str, peer: int = -1) -> None:
        super().__init__(reason)
        self.peer = peer


class Unreached(LinkError):
    """A peer that was dialed could not be reached, or did not answer."""


class Cancelled(LinkError):
    """The epoch whose links were being opened was closed meanwhile."""


class GroupGone(LinkError):
    """A member has destroyed this group, so what was called on it cannot be done. Nobody is to blame for a broken link."""

    def __init__(self, group: str, by: int) -> None:
        super().__init__(
            f"rank {by} has destroyed group {group}: nothing more can be done on it, by no rank; destroy a group on all of its "
            "ranks, each after its last call on it",
            by,
        )


class CannotConnect(OSError):
    """This process can open no connection at all, whoever the peer is; the text says what to do."""


def dial(
    member: Member,
    key: bytes,
    hello: Hello,
    deadline_s: float,
    on_socket: Callable[[socket.socket], None],
    *,
    nearby: bool = False,
    offer: Offer | None = None,
) -> tuple[Connection, Verdict]:
    """One attempt. `deadline_s` is a moment of time.monotonic(). `on_socket` learns of the socket before anything can block.

    `nearby`: the member has this host's address; if it really is on this host, the connection does not go through the network,
    and what `offer` holds, if anything, is offered. The connection is of use only if the verdict is ok. Raises LinkError or
    CannotConnect.
    """
    reached = _reach_nearby(handshake.nearby_name(key, member.host, member.port), on_socket) if nearby else None
    sock = reached or _new_socket(network.family(member.host))
    connected = reached is not None
    try:
        if not connected:
            on_socket(sock)
            network.prepare(sock)
            _set_deadline(sock, deadline_s)
            sock.connect((member.host, member.port))
            connected = True
        greeted = _receive(sock, handshake.GREETING_BYTES, deadline_s)
        if not greeted.startswith(handshake.GREETING):
            raise handshake.HandshakeRefused("something else than tmd answers there")
        if reached is not None and offer is not None and offer.make():
            hello = msgspec.structs.replace(hello, ring_bytes=RING_BYTES)
            sealed = handshake.seal_hello(key, greeted, hello)
            socket.send_fds(sock, [sealed[:1]], [offer.descriptor])
            sock.sendall(sealed[1:])
        else:
            sock.sendall(handshake.seal_hello(key, greeted, hello))
        size = handshake.body_bytes(_receive(sock, handshake.LENGTH.size, deadline_s))
        sealed = _receive(sock, size + handshake.MAC_BYTES, deadline_s)
        verdict = handshake.open_verdict(key, greeted, hello, sealed[:size], sealed[size:])
    except (OSError, handshake.HandshakeRefused) as error:
        sock.close()
        why = _why(error, connected=connected)
        raise LinkError(f"{member.incarnation} on {member.node}: port {member.port} on {member.host}: {why}") from None
    except BaseException:
        sock.close()
        raise
    return Connection(sock, offer.taken() if offer is not None and verdict.shared else None), verdict


def _new_socket(family: int) -> socket.socket:
    """Raises CannotConnect."""
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotConnect(f"this rank cannot open a socket ({error.strerror}); {network.DESCRIPTORS_HINT}") from None


def _why(error: OSError | handshake.HandshakeRefused, *, connected: bool) -> str:
    """What happened, and where it may lie in the network what to look at."""
    if connected:
        return "no answer in time" if isinstance(error, TimeoutError) else str(error)
    if isinstance(error, TimeoutError):
        return (
            "connection timed out: is it reachable from this node? a firewall may drop it; "
            "tmd-run --port-range FIRST-LAST fixes the ports"
        )
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: the process there has ended, or a firewall rejects the port"
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return (
            f"{error.strerror}: this node has no way to that address; "
            "tmd-run --host or --interface on that node chooses another one"
        )
    return str(error)


def _reach_nearby(name: bytes, on_socket: Callable[[socket.socket], None]) -> socket.socket | None:
    """None if nobody listens there, or another user: the address belongs to another namespace, or the process is gone."""
    sock = _new_socket(socket.AF_UNIX)
    try:
        on_socket(sock)
        sock.bind("")  # a name of its own, by which the two ends of a connection can be told
        sock.setblocking(False)
        sock.connect(name)
        if not network.is_same_user(sock):
            raise PermissionError
    except OSError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def _set_deadline(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def _receive(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        _set_deadline(sock, deadline_s)
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed the connection during the handshake: it does not hold this job's key, or is ending")
        data += piece
    return bytes(data)
