"""Messages on a socket pair, from the agent's end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from tmd.protocol.codec import FROM_RANK, TO_RANK, FrameReader, frame
from tmd.protocol.control import ToRank

Wanted = TypeVar("Wanted")


def send(sock: socket.socket, *messages: ToRank) -> None:
    for message in messages:
        sock.sendall(frame(TO_RANK.encode(message)))


def receive(sock: socket.socket, kind: type[Wanted], *, until: Callable[[Wanted], bool]) -> list[Wanted]:
    """The messages of this kind up to the first one for which `until` holds. Raises TimeoutError by the socket's timeout."""
    reader, found = FrameReader(FROM_RANK), []
    while True:
        for message in reader.feed(sock.recv(1 << 16)):
            if isinstance(message, kind):
                found.append(message)
                if until(message):
                    return found
