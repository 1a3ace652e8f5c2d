"""What all connections between the processes of a job have in common where they go through the network: IPv4 or IPv6 by the
address, no gathering of small pieces, and a host that vanishes is noticed although nothing is being sent. Within a host only
processes of one user speak to one another without it."""

from __future__ import annotations

import os
import socket
import struct

#: pid, uid, gid.
_CREDENTIALS = struct.Struct("=iii")
#: After this long without a byte from the peer its kernel is asked for a sign of life, and then again and again.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
#: So many questions without an answer end the connection.
KEEPALIVE_PROBES = 4
#: When an idle connection to a host that has vanished ends. A process that is merely stopped is no such host: its kernel answers.
VANISHED_S = KEEPALIVE_IDLE_S + KEEPALIVE_EVERY_S * KEEPALIVE_PROBES
#: What to do when the kernel has no descriptor for one more connection.
DESCRIPTORS_HINT = "look for files that the script opens and never closes, or raise the limit (ulimit -n)"


def family(host: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(sock: socket.socket) -> None:
    """For each end of a TCP connection. Raises OSError if it is gone already.

    What is served answers in several small pieces: without TCP_NODELAY each of them may wait 40 ms for the peer's word. No
    TCP_USER_TIMEOUT: that would also end the connection to a living peer which does not read for so long, in a long step.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def is_same_user(sock: socket.socket) -> bool:
    """The process at the other end of this unix socket has our user, as the kernel of this host sees it from here."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
