"""Bytes over a blocking socket: frames with a digest, and the memory of many tensors with few system calls.

Contract: every failure (closed, stalled for `deadline_s`, too large, damaged) is a TransferBroken that names what was moving.
Payload is read and written where it lies, in pieces of PIECE_BYTES that are digested while they are in the cache.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
import xxhash

from tmd_worker.state.errors import TransferBroken
from tmd_worker.state.tensors import memory_of

#: Manifests and records; a larger one is refused before memory is taken for it.
MAX_FRAME_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
#: Pieces per system call, far below IOV_MAX.
_BATCH_PIECES = 256
DIGEST_BYTES = 16
_HEADER = struct.Struct("!4sQ")
_MAGIC = b"TMDS"


class Stream:
    """Borrows the socket while it is entered; its timeout is put back afterwards. `received` is told at the end how many bytes
    have come, whether they were of use or not."""

    def __init__(self, sock: socket.socket, deadline_s: float, received: Callable[[int], None] = lambda _: None) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._received = received
        self._received_bytes = 0
        self._timeout_before = sock.gettimeout()

    def __enter__(self) -> Stream:
        self._sock.settimeout(self._deadline_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._received(self._received_bytes)
        if self._sock.fileno() >= 0:
            self._sock.settimeout(self._timeout_before)

    # ---------------------------------------------------------------- frames

    def send_frame(self, what: str, body: bytes) -> None:
        if len(body) > MAX_FRAME_BYTES:
            raise TransferBroken(f"{what} has {len(body)} bytes, {MAX_FRAME_BYTES} is the most that can be handed over")
        views = [memoryview(part) for part in (_HEADER.pack(_MAGIC, len(body)), body, xxhash.xxh3_128_digest(body)) if part]
        self._send(what, views)

    def receive_frame(self, what: str) -> bytes:
        header = bytearray(_HEADER.size)
        self._receive(what, [memoryview(header)])
        magic, size = _HEADER.unpack(header)
        if magic != _MAGIC or size > MAX_FRAME_BYTES:
            raise TransferBroken(f"{what} was expected; what came is no frame of this protocol or too large ({size} bytes)")
        body, digest = bytearray(size), bytearray(DIGEST_BYTES)
        self._receive(what, [memoryview(part) for part in (body, digest) if part])
        if xxhash.xxh3_128_digest(body) != digest:
            raise TransferBroken(f"{what} arrived damaged: its digest differs")
        return bytes(body)

    # ---------------------------------------------------------------- tensors

    def send_entries(self, names: list[str], tensors: list[torch.Tensor]) -> list[bytes]:
        """Dense CPU memory of all tensors; returns their digests."""
        digests = [xxhash.xxh3_128() for _ in tensors]
        for batch in _batches(tensors):
            for number, piece in batch:
                digests[number].update(piece)
            self._send(names[batch[0][0]], [piece for _, piece in batch])
        return [digest.digest() for digest in digests]

    def receive_entries(self, names: list[str], tensors: list[torch.Tensor]) -> list[bytes]:
        """Into dense CPU memory; returns the digests of what arrived."""
        digests = [xxhash.xxh3_128() for _ in tensors]
        for batch in _batches(tensors):
            self._receive(names[batch[0][0]], [piece for _, piece in batch])
            for number, piece in batch:
                digests[number].update(piece)
        return [digest.digest() for digest in digests]

    # ---------------------------------------------------------------- system calls

    def _send(self, what: str, views: list[memoryview]) -> None:
        while views:
            try:
                sent = self._sock.sendmsg(views)
            except OSError as error:
                raise self._broken(what, "sending", error) from error
            views = _after(views, sent)

    def _receive(self, what: str, views: list[memoryview]) -> None:
        while views:
            try:
                received = self._sock.recvmsg_into(views)[0]
            except OSError as error:
                raise self._broken(what, "receiving", error) from error
            if received == 0:
                missing = sum(len(view) for view in views)
                raise TransferBroken(f"the link closed while receiving {what}: {missing} bytes of this part are missing")
            self._received_bytes += received
            views = _after(views, received)

    def _broken(self, what: str, doing: str, error: OSError) -> TransferBroken:
        if isinstance(error, TimeoutError):
            return TransferBroken(f"nothing moved for {self._deadline_s:g} s while {doing} {what}")
        return TransferBroken(f"the link broke while {doing} {what}: {error}")


def _batches(tensors: list[torch.Tensor]) -> Iterator[list[tuple[int, memoryview]]]:
    """(number of the tensor, piece of its memory), grouped so that a system call moves about PIECE_BYTES. The same on both
    sides, though nothing depends on that."""
    batch: list[tuple[int, memoryview]] = []
    size = 0
    for number, tensor in enumerate(tensors):
        view = memoryview(memory_of(tensor).data)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            batch.append((number, piece))
            size += len(piece)
            if size >= PIECE_BYTES or len(batch) == _BATCH_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left once `moved` bytes of `views` are done."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
