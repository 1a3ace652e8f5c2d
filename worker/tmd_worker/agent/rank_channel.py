"""The agent's end of one rank's control socket.

Contract: never blocks, and is bounded in both directions. Inwards a rank that floods is read slower (its own sends then
wait); outwards the newest directive replaces the one that was not sent yet. What a rank may not do ends in `on_bad`, once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
from collections.abc import Callable

from tmd.protocol.agent import StoreReply
from tmd.protocol.codec import FROM_RANK, TO_RANK, FrameReader, MessageRefused, frame
from tmd.protocol.control import FromRank, PeerExiting, RankOrder, RankUpdate, RankWelcome
from tmd.protocol.rank import Directive

_CHUNK_BYTES = 1 << 16
#: A rank may send this many messages per window; more wait in its socket.
MESSAGES_PER_WINDOW = 200
WINDOW_S = 0.05
#: Replies that a rank asked for and does not read.
UNREAD_LIMIT_BYTES = 16 << 20


class RankChannel:
    """One rank's control socket, on the event loop's thread."""

    def __init__(
        self,
        sock: socket.socket,
        incarnation: str,
        *,
        on_message: Callable[[FromRank], None],
        on_bad: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._incarnation = incarnation
        self._on_message = on_message
        self._on_bad = on_bad
        self._frames: FrameReader[FromRank] = FrameReader(FROM_RANK)
        self._window_count = 0
        self._window_end: asyncio.TimerHandle | None = None
        self._out: collections.deque[memoryview] = collections.deque()
        self._out_bytes = 0
        self._order: Directive | None = None
        self._newest: tuple[int, int] | None = None
        self._writing = False
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    # ---------------------------------------------------------------- to the rank

    def welcome(self, welcome: RankWelcome) -> None:
        self._queue(frame(TO_RANK.encode(welcome)))

    def order(self, directive: Directive) -> None:
        """Older than the newest one that was passed on: nothing happens."""
        stamp = (directive.generation, directive.sequence)
        if self._newest is not None and stamp <= self._newest:
            return
        self._newest = stamp
        self._order = directive
        self._flush()

    def peer_exiting(self, incarnation: str) -> None:
        self._queue(frame(TO_RANK.encode(PeerExiting(incarnation=incarnation))))

    def reply(self, reply: StoreReply) -> None:
        self._queue(frame(TO_RANK.encode(reply)))

    def _queue(self, data: bytes) -> None:
        if self._closed:
            return
        if self._out_bytes + len(data) > UNREAD_LIMIT_BYTES:
            self._bad(f"has {self._out_bytes} bytes of answers waiting and does not read them")
            return
        self._out.append(memoryview(data))
        self._out_bytes += len(data)
        self._flush()

    def _flush(self) -> None:
        try:
            while not self._closed and (self._out or self._order is not None):
                if not self._out and self._order is not None:
                    data = frame(TO_RANK.encode(RankOrder(directive=self._order)))
                    self._order = None
                    self._out.append(memoryview(data))
                    self._out_bytes += len(data)
                sent = self._socket.send(self._out[0])
                self._out_bytes -= sent
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except BlockingIOError:
            self._set_writing(True)
            return
        except OSError:  # the rank closed its end or is gone: the process watch knows more
            self._out.clear()
            self._out_bytes = 0
            self._order = None
        self._set_writing(False)

    def _set_writing(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._socket, self._flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._socket)
        self._writing = wanted

    # ---------------------------------------------------------------- from the rank

    def _readable(self) -> None:
        if self._window_end is None:
            self._window_end = self._loop.call_later(WINDOW_S, self._next_window)
        more = self._read()
        if not self._closed and (not more or self._window_count > MESSAGES_PER_WINDOW):
            self._loop.remove_reader(self._socket)  # for good, or until the next window

    def _next_window(self) -> None:
        self._window_end = None
        paused, self._window_count = self._window_count > MESSAGES_PER_WINDOW, 0
        if paused and not self._closed:
            self._loop.add_reader(self._socket, self._readable)

    def _read(self) -> bool:
        """One chunk; False once nothing more will come."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            messages = self._frames.feed(data)
        except MessageRefused as error:
            self._bad(str(error))
            return False
        self._window_count += len(messages)
        for message in messages:
            if self._closed:
                break
            if _speaker(message) != self._incarnation:
                self._bad(f"spoke in the name of incarnation {_speaker(message)!r}")
                return False
            self._on_message(message)
        return not self._closed

    def read_rest(self) -> None:
        """What a dying rank has sent and nobody has read yet: its last status says whether it ends orderly."""
        while not self._closed and self._pending() and self._read():
            pass

    def _pending(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def _bad(self, what: str) -> None:
        if not self._closed:
            self.close()
            self._on_bad(what)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._window_end is not None:
            self._window_end.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()


def _speaker(message: FromRank) -> str:
    return message.status.incarnation if isinstance(message, RankUpdate) else message.incarnation
