"""The rank's side of the socket pair to its agent.

Contract: nothing here ever blocks the training thread. Statuses are level-triggered, so only the newest one waits to be
sent; store requests are sent in order. If the agent closes the socket, training goes on and `closed` is set: what must reach
the daemon then waits until the agent's end takes this process along.
"""

from __future__ import annotations

import collections
import socket
import threading
import time
from collections.abc import Callable

from tmd.protocol.agent import StoreReply, StoreRequest
from tmd.protocol.codec import FROM_RANK, TO_RANK, FrameReader, frame
from tmd.protocol.control import FromRank, RankUpdate, RankWelcome, ToRank
from tmd.protocol.rank import RankStatus
from tmd_worker.threads import start_thread

_READ_BYTES = 1 << 16
#: How long an agent may take to say welcome.
WELCOME_TIMEOUT_S = 60.0


class Control:
    """Two threads on one socket: a reader that calls `on_message`, a sender that drains the queue."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader(TO_RANK)
        self._backlog: collections.deque[ToRank] = collections.deque()
        self._wake = threading.Condition()
        self._status: RankStatus | None = None
        self._requests: collections.deque[StoreRequest] = collections.deque()
        self._sending = False
        self._replies: dict[int, StoreReply | None] = {}
        self._on_message: Callable[[ToRank], None] | None = None
        self.closed = False

    def welcome(self) -> RankWelcome:
        """The agent's first message. Raises ConnectionError if there is none in time."""
        self._sock.settimeout(WELCOME_TIMEOUT_S)
        while not self._backlog:
            try:
                data = self._sock.recv(_READ_BYTES)
            except TimeoutError:
                raise ConnectionError(f"the agent said nothing within {WELCOME_TIMEOUT_S:.0f} s of this rank's start") from None
            if not data:
                raise ConnectionError("the agent closed the control socket before it said welcome")
            self._backlog += self._reader.feed(data)
        self._sock.settimeout(None)
        first = self._backlog.popleft()
        if not isinstance(first, RankWelcome):
            raise ConnectionError(f"the agent's first message was {type(first).__name__}, expected RankWelcome")
        return first

    def start(self, on_message: Callable[[ToRank], None]) -> None:
        """From here on `on_message` is called for every message but store replies, in the reader's thread."""
        self._on_message = on_message
        start_thread("control-reader", self._read)
        start_thread("control-sender", self._send)

    def send_status(self, status: RankStatus) -> None:
        """Replaces a status that still waits, unless that one is newer. Never blocks."""
        with self._wake:
            if self._status is None or status.version > self._status.version:
                self._status = status
            self._wake.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was queued has been handed to the kernel; False if it was not in time, or nobody listens."""
        with self._wake:
            return self._wake.wait_for(lambda: self.closed or self._idle(), timeout_s) and not self.closed

    def request(self, request: StoreRequest, timeout_s: float) -> StoreReply:
        """Sends a store request and waits; the same id may be asked again. Raises TimeoutError, or ConnectionError when the
        agent is gone."""
        number = request.request_id
        with self._wake:
            self._replies[number] = None
            self._requests.append(request)
            self._wake.notify_all()
            self._wake.wait_for(lambda: self.closed or self._replies[number] is not None, timeout_s)
            reply = self._replies.pop(number)
        if reply is not None:
            return reply
        if self.closed:
            raise ConnectionError("the agent closed the control socket while a store request was under way")
        raise TimeoutError(f"no answer to store request {request.operation} {request.key!r} within {timeout_s:.0f} s")

    def _idle(self) -> bool:
        return self._status is None and not self._requests and not self._sending

    def _close(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify_all()

    def _read(self) -> None:
        while True:
            while self._backlog:
                self._dispatch(self._backlog.popleft())
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self._close()
                return
            self._backlog += self._reader.feed(data)

    def _dispatch(self, message: ToRank) -> None:
        if isinstance(message, StoreReply):
            with self._wake:
                if message.request_id in self._replies:
                    self._replies[message.request_id] = message
                    self._wake.notify_all()
        elif self._on_message is not None:
            self._on_message(message)

    def _send(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self.closed or not self._idle())
                if self.closed:
                    return
                message = self._take()
                self._sending = True
            try:
                self._sock.sendall(frame(FROM_RANK.encode(message)))
            except OSError:
                self._close()
                return
            with self._wake:
                self._sending = False
                self._wake.notify_all()

    def _take(self) -> FromRank:
        """Statuses first: a request can wait for seconds, a report of poison must not."""
        if self._status is not None:
            status, self._status = self._status, None
            return RankUpdate(status=status)
        return self._requests.popleft()


class Heart:
    """Calls `beat` every `interval_s` seconds until the process ends."""

    def __init__(self, interval_s: float, beat: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._beat = beat

    def start(self) -> None:
        start_thread("heartbeat", self._run)

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            self._beat()
