"""Frames with a digest over the control connection of a handoff, each by a deadline.

Contract: every failure (closed, stalled for `deadline_s`, too large, damaged) is a TransferBroken that names what was moving.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import msgspec
import xxhash

from tmd_worker.state.errors import TransferBroken

#: Manifests and records; a larger one is refused before memory is taken for it.
MAX_FRAME_BYTES = 1 << 30
#: How often an end that gets on tells the other one so.
BEAT_S = 1.0
_DIGEST_BYTES = 16
_HEADER = struct.Struct("!4sQ")
_MAGIC = b"TMDS"

_Message = TypeVar("_Message")


class Control:
    """Borrows the socket while it is entered; its timeout is put back afterwards. `received` is told at the end how many bytes
    have come, whether they were of use or not. Any thread may send, one at a time receives."""

    def __init__(self, sock: socket.socket, deadline_s: float, received: Callable[[int], None] = lambda _: None) -> None:
        self._sock = sock
        self.deadline_s = deadline_s
        self._received = received
        self._received_bytes = 0
        self._sending = threading.Lock()
        self._timeout_before = sock.gettimeout()

    def __enter__(self) -> Control:
        self._sock.settimeout(self.deadline_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._received(self._received_bytes)
        if self._sock.fileno() >= 0:
            self._sock.settimeout(self._timeout_before)

    def send(self, what: str, message: msgspec.Struct) -> None:
        self.send_bytes(what, msgspec.msgpack.encode(message))

    def receive(self, what: str, kind: type[_Message]) -> _Message:
        try:
            return msgspec.msgpack.decode(self.receive_bytes(what), type=kind)
        except msgspec.DecodeError as error:
            raise TransferBroken(f"{what} is malformed: {error}; nothing was changed") from error

    def send_bytes(self, what: str, body: bytes) -> None:
        if len(body) > MAX_FRAME_BYTES:
            raise TransferBroken(f"{what} has {len(body)} bytes, {MAX_FRAME_BYTES} is the most that can be handed over")
        try:
            with self._sending:
                self._sock.sendall(_HEADER.pack(_MAGIC, len(body)) + body + xxhash.xxh3_128_digest(body))
        except OSError as error:
            raise self._broken(what, "sending", error) from error

    def receive_bytes(self, what: str) -> bytes:
        magic, size = _HEADER.unpack(self._receive(what, _HEADER.size))
        if magic != _MAGIC or size > MAX_FRAME_BYTES:
            raise TransferBroken(f"{what} was expected; what came is no frame of this protocol or too large ({size} bytes)")
        body = self._receive(what, size)
        if xxhash.xxh3_128_digest(body) != self._receive(what, _DIGEST_BYTES):
            raise TransferBroken(f"{what} arrived damaged: its digest differs")
        return body

    def _receive(self, what: str, size: int) -> bytes:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                received = self._sock.recv_into(left)
            except OSError as error:
                raise self._broken(what, "receiving", error) from error
            if not received:
                raise TransferBroken(f"the link closed while receiving {what}: {len(left)} bytes of this part are missing")
            self._received_bytes += received
            left = left[received:]
        return bytes(data)

    def beats(self, body: bytes) -> Beats:
        """`body`: the frame that says so."""
        return Beats(lambda: self.send_bytes("a beat", body))

    def _broken(self, what: str, doing: str, error: OSError) -> TransferBroken:
        if isinstance(error, TimeoutError):
            return TransferBroken(f"nothing moved for {self.deadline_s:g} s while {doing} {what}")
        return TransferBroken(f"the link broke while {doing} {what}: {error}")


class Beats:
    """Tells the other end from time to time that this one gets on with what it sees nothing of: bytes of one-sided reads or of
    other sources, digests."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last_s = time.monotonic()

    def __call__(self) -> None:
        """Whenever something has been done, from any thread; most calls do nothing."""
        with self._lock:
            if time.monotonic() - self._last_s < BEAT_S:
                return
            self._last_s = time.monotonic()
            try:
                self._send()
            except TransferBroken:
                pass  # what becomes of the transfer will show
