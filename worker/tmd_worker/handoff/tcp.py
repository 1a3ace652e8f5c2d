"""The transport that always works: a few connections, each with a thread at either end that asks for chunks or sends them.

Contract: see `transfer`. The connections are authenticated where they are dialed (job key) and name their handoff by a token that
went over the control channel. The joiner asks for pieces of what was exported and gets their bytes, nothing around them but one
status per chunk. Both ends bound each chunk by a deadline; a connection that fails gives its chunks back to the others.

On the wire: a request is `TMDR`, the number of pieces (unsigned 32 bit), and for each piece entry (32), offset (64), size (64).
The answer is one byte, 0 and then the bytes of all pieces, or 1 and then a reason: its length (32) and UTF-8; then the
connection ends.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tmd_worker.handoff.transfer import CHUNK_PIECES, Chunk, Dial, Memory, Piece, Region, TransferFailed, Work
from tmd_worker.handoff.wire import Wire, view_of
from tmd_worker.threads import start_thread

#: On loopback two are faster than one, and four are not faster than two.
STREAMS = 2
#: Chunks that a connection has asked for and not got, so that the source never waits for the next request.
DEPTH = 4
#: The kind of connection that `serve` takes.
SERVICE = "handoff"
_TOKEN_BYTES = 16
_LEAST_S = 0.001
#: A connection that was shut ends within LOOK_S, unless this process gets no processor.
_CLOSE_S = 10.0
_REQUEST = struct.Struct("!4sI")
_PIECE = struct.Struct("!IQQ")
_MAGIC = b"TMDR"
_REASON = struct.Struct("!I")
_REASON_BYTES = 4096
_CLOSED = "this end was closed"
#: Every source lets itself be asked for these, before anything is exported.
_TRIAL = Piece(0xFFFFFFFF, 0, 4096)

_log = logging.getLogger(__name__)


class Answer(msgspec.Struct, frozen=True):
    """What a source says to a joiner's hello: the name of the handoff, and what the trial piece holds."""

    token: bytes
    trial: bytes


class Tcp:
    """The transport, for all handoffs of a process. `tls`: contexts for (serving, dialing), or None for plain connections."""

    name = "tcp"

    def __init__(self, streams: int = STREAMS, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None) -> None:
        self._streams = streams
        self._tls = tls
        self._lock = threading.Lock()
        self._sources: dict[bytes, TcpSource] = {}

    def probe(self) -> str:
        return ""

    def source(self) -> TcpSource:
        return TcpSource(self)

    def joiner(self, dial: Dial) -> TcpJoiner:
        return TcpJoiner(dial, self._streams, None if self._tls is None else self._tls[1])

    def serve(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        """A connection that a joiner has dialed; returns when it has ended. Raises OSError if nobody here waits for it."""
        token = fields.get("token")
        with self._lock:
            source = self._sources.get(token) if isinstance(token, bytes) else None
        if source is None:
            sock.close()
            raise ConnectionError("the handoff that this connection is for is over")
        if self._tls is not None:
            sock = self._tls[0].wrap_socket(sock, server_side=True)
        source.serve(sock)

    def admit(self, token: bytes, source: TcpSource) -> None:
        with self._lock:
            self._sources[token] = source

    def dismiss(self, token: bytes) -> None:
        with self._lock:
            self._sources.pop(token, None)


class TcpSource:
    """A source's end. `moved_bytes` grows while it is read."""

    def __init__(self, transport: Tcp) -> None:
        self._transport = transport
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._trial = secrets.token_bytes(_TRIAL.size_bytes)
        #: Guards what is below; told when a connection has ended.
        self._changed = threading.Condition()
        self._wires: set[Wire] = set()
        self._exported: tuple[memoryview, ...] = ()
        self._timeout_s = math.inf
        self._closed = False
        self.moved_bytes = 0

    def prepare(self, memory: Sequence[Memory]) -> None:
        """Nothing to do: the kernel reads any memory."""

    def accept(self, hello: bytes, timeout_s: float) -> bytes:
        self._timeout_s = timeout_s
        self._transport.admit(self._token, self)
        return msgspec.msgpack.encode(Answer(self._token, self._trial))

    def export(self, memory: Sequence[Memory]) -> tuple[Region, ...]:
        self._exported = tuple(view_of(part) for part in memory)
        return tuple(Region(part.address, part.size_bytes, entry) for entry, part in enumerate(memory))

    def close(self) -> None:
        """The connections are gone when it returns, so nothing reads the exported memory any more."""
        self._transport.dismiss(self._token)
        with self._changed:
            self._closed = True
            self._exported = ()
            wires = list(self._wires)
        for wire in wires:
            wire.shut()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._wires, _CLOSE_S):
                _log.error("%d connections of a handoff did not end in %g s after they were shut", len(self._wires), _CLOSE_S)

    def serve(self, sock: socket.socket) -> None:
        """Answers requests until either side ends the connection."""
        wire = Wire(sock)
        with self._changed:
            if not self._closed:
                self._wires.add(wire)
        try:
            while not self._closed:
                self._answer(wire, self._request(wire))
        except OSError as error:
            if not self._closed:
                _log.debug("a connection of a handoff ended: %s", error)
        finally:
            wire.close()
            with self._changed:
                self._wires.discard(wire)
                self._changed.notify_all()

    def _request(self, wire: Wire) -> list[Piece]:
        """The next one. Raises OSError."""
        header = bytearray(_REQUEST.size)
        wire.receive([memoryview(header)], math.inf)
        magic, count = _REQUEST.unpack(header)
        if magic != _MAGIC or count > CHUNK_PIECES:
            raise ConnectionError("what came is no request for a chunk")
        body = bytearray(count * _PIECE.size)
        wire.receive([memoryview(body)], time.monotonic() + self._timeout_s)
        return [Piece(*fields) for fields in _PIECE.iter_unpack(body)]

    def _answer(self, wire: Wire, pieces: list[Piece]) -> None:
        """Raises OSError."""
        deadline_s = time.monotonic() + self._timeout_s
        exported = self._exported
        views = [memoryview(b"\0")]
        for piece in pieces:
            if piece == _TRIAL:
                views.append(memoryview(self._trial))
                continue
            view = exported[piece.entry] if piece.entry < len(exported) else memoryview(b"")
            if piece.offset + piece.size_bytes > len(view):
                reason = f"{piece.size_bytes} bytes at {piece.offset} of entry {piece.entry} are not exported".encode()
                wire.send([memoryview(b"\1" + _REASON.pack(len(reason)) + reason)], deadline_s)
                raise ConnectionError(reason.decode())
            views.append(view[piece.offset : piece.offset + piece.size_bytes])
        wire.send(views, deadline_s)
        moved = sum(len(view) for view in views)
        with self._changed:
            self.moved_bytes += moved


class TcpJoiner:
    """A joiner's end."""

    def __init__(self, dial: Dial, streams: int, tls: ssl.SSLContext | None) -> None:
        self._dial = dial
        self._streams = streams
        self._tls = tls
        #: Guards the two below.
        self._lock = threading.Lock()
        self._wires: list[Wire] = []
        self._closed = False
        #: Held while the connections are used.
        self._using = threading.Lock()

    def prepare(self, memory: Sequence[Memory]) -> None:
        """Nothing to do: the kernel writes into any memory."""

    def hello(self) -> bytes:
        return b""

    def connect(self, answer: bytes, timeout_s: float) -> None:
        try:
            with self._using:
                self._connect(msgspec.msgpack.decode(answer, type=Answer), time.monotonic() + timeout_s)
        except (OSError, msgspec.DecodeError) as error:
            raise TransferFailed(f"tcp: no connection to the source's data: {error}") from error

    def _connect(self, accepted: Answer, deadline_s: float) -> None:
        for _ in range(self._streams):
            if self._closed:
                raise ConnectionError(_CLOSED)
            sock = self._dial({"token": accepted.token}, max(deadline_s - time.monotonic(), _LEAST_S))
            self._keep(Wire(sock if self._tls is None else _in_tls(sock, self._tls, deadline_s)))
        for wire in self._wires:
            trial = bytearray(_TRIAL.size_bytes)
            _ask(wire, (_TRIAL,), deadline_s)
            _receive(wire, [memoryview(trial)], deadline_s)
            if trial != accepted.trial:
                raise ConnectionError("the bytes of the trial arrived changed")

    def _keep(self, wire: Wire) -> None:
        """Raises ConnectionError if this end was closed while it dialed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._wires.append(wire)
        if closed:
            wire.close()
            raise ConnectionError(_CLOSED)

    def read(self, regions: Sequence[Region], memory: Sequence[Memory], work: Work, timeout_s: float) -> None:
        if [region.size_bytes for region in regions] != [part.size_bytes for part in memory]:
            raise TransferFailed("tcp: the source exports other sizes than are to be read")
        views = [view_of(part) for part in memory]
        reasons: list[str] = []

        def run(wire: Wire) -> None:
            try:
                _move(wire, views, work, timeout_s)
            except OSError as error:
                reasons.append(str(error))
                wire.shut()

        with self._using:
            threads = [start_thread("handoff-stream", functools.partial(run, wire)) for wire in self._wires]
            for thread in threads:
                thread.join()  # each is bound by its chunks' deadlines
        if reasons and work.missing:
            raise TransferFailed(f"tcp: {reasons[0]}")

    def close(self) -> None:
        """For good: nothing is dialed and no byte is written any more once it returns."""
        with self._lock:
            self._closed = True
            wires = list(self._wires)
        for wire in wires:
            wire.shut()
        with self._using:
            for wire in wires:
                wire.close()


def _move(wire: Wire, views: Sequence[memoryview], work: Work, timeout_s: float) -> None:
    """One connection's share of the work. Raises OSError; what it had taken and not got is given back."""
    asked: collections.deque[tuple[Chunk, float]] = collections.deque()
    try:
        while True:
            while len(asked) < DEPTH and (chunk := work.take(wait=not asked)) is not None:
                asked.append((chunk, time.monotonic() + timeout_s))
                _ask(wire, chunk.pieces, asked[-1][1])
            if not asked:
                return
            chunk, deadline_s = asked[0]
            parts = [views[piece.entry][piece.offset : piece.offset + piece.size_bytes] for piece in chunk.pieces]
            _receive(wire, parts, deadline_s)
            asked.popleft()
            work.landed(chunk)
    finally:
        for chunk, _ in reversed(asked):
            work.give_back(chunk)


def _ask(wire: Wire, pieces: Sequence[Piece], deadline_s: float) -> None:
    request = _REQUEST.pack(_MAGIC, len(pieces)) + b"".join(_PIECE.pack(*piece) for piece in pieces)
    wire.send([memoryview(request)], deadline_s)


def _receive(wire: Wire, parts: list[memoryview], deadline_s: float) -> None:
    status = bytearray(1)
    wire.receive([memoryview(status)], deadline_s)
    if status[0]:
        size = bytearray(_REASON.size)
        wire.receive([memoryview(size)], deadline_s)
        reason = bytearray(min(_REASON.unpack(size)[0], _REASON_BYTES))
        wire.receive([memoryview(reason)], deadline_s)
        raise ConnectionError(f"the source refused: {reason.decode(errors='replace')}")
    wire.receive(parts, deadline_s)


def _in_tls(sock: socket.socket, context: ssl.SSLContext, deadline_s: float) -> socket.socket:
    sock.settimeout(max(deadline_s - time.monotonic(), _LEAST_S))
    return context.wrap_socket(sock)
