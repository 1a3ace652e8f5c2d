"""Two ends of a hand-over in one process, and what may stand between them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
import torch

from tmd_worker.state.errors import StateError, TransferBroken
from tmd_worker.state.handoff import receive_state, send_state
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.tracked import Tracked

DEADLINE_S = 10.0

Sides = tuple[Manifest | BaseException, BaseException | None]


def hand_over(
    source: Tracked,
    target: Tracked,
    *,
    step: int,
    per_rank: bool = True,
    change: Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]] = lambda m, t: (m, t),
    wire: Callable[[socket.socket, socket.socket], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Sides:
    """(the manifest or the receiver's error, the sender's error). `wire` stands between the two and may damage bytes."""
    manifest, tensors = change(*source.full_state(step=step, epoch=3))
    ends = socket.socketpair()
    sockets = list(ends)
    relay = None
    if wire is not None:
        middle = socket.socketpair()
        sockets += middle
        relay = threading.Thread(target=wire, args=(ends[1], middle[0]))
        relay.start()
        ends = (ends[0], middle[1])
    heard: list[BaseException | None] = [None]

    def send() -> None:
        try:
            send_state(ends[0], manifest, tensors, deadline_s)
        except StateError as error:
            heard[0] = error

    sender = threading.Thread(target=send)
    sender.start()
    received: Manifest | BaseException
    try:
        received = receive_state(ends[1], target, deadline_s, per_rank=per_rank)
    except StateError as error:
        received = error
    if isinstance(received, TransferBroken):
        ends[1].close()
    sender.join(2 * DEADLINE_S)
    assert not sender.is_alive()
    for sock in sockets:
        sock.close()
    if relay is not None:
        relay.join(DEADLINE_S)
        assert not relay.is_alive()
    return received, heard[0]


class Closed(Exception):
    """Raised by a `change` with the last bytes that get through."""


def forward(left: socket.socket, right: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Carries bytes both ways until either end closes; those from left to right through `change`, which may end it."""

    def back() -> None:
        try:
            while data := right.recv(1 << 16):
                left.sendall(data)
        except OSError:
            pass

    answers = threading.Thread(target=back)
    answers.start()
    try:
        while data := left.recv(1 << 16):
            right.sendall(change(data))
    except Closed as last:
        right.sendall(*last.args)
    except OSError:
        pass
    for sock in (left, right):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    answers.join(DEADLINE_S)


class Cut:
    """Lets `limit_bytes` pass, then closes the connection."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def __call__(self, data: bytes) -> bytes:
        if len(data) > self.left_bytes:
            raise Closed(data[: self.left_bytes])
        self.left_bytes -= len(data)
        return data


class Flip:
    """Changes one bit of the byte at `place`."""

    def __init__(self, place: int, bit: int) -> None:
        self.place, self.bit, self.passed = place, bit, 0

    def __call__(self, data: bytes) -> bytes:
        at = self.place - self.passed
        self.passed += len(data)
        if 0 <= at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << self.bit]) + data[at + 1 :]
        return data


def wire_bytes(source: Tracked) -> int:
    """How much the sender sends, about."""
    manifest, _ = source.full_state(step=4, epoch=3)
    return manifest.total_bytes + len(msgspec.msgpack.encode(manifest)) + 17 * len(manifest.entries)
