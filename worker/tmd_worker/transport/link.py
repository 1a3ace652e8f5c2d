"""One connection to one peer, cut into frames.

Contract: at most one thread reads a link at a time, and it declares itself with `hold`/`release`; whoever sends has
`tx_lock`. `interrupt`, `say_stop` and `shut` may come from any thread at any time: a thread that waits on the link wakes up with
LinkEnded, and the stream below is closed only once nobody uses it, so neither a descriptor that was reused nor memory that was
given back is ever touched.
"""

from __future__ import annotations

import dataclasses
import math
import select
import socket
import threading
from collections.abc import Mapping

from tmd_worker import faults
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.stream import HANG_UP, Buffer, stream_of, wait_for
from tmd_worker.transport.wire import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    STOP_FRAME,
    Kind,
    StaleFrame,
    check_header,
)

#: How long closing waits for a thread in the middle of a frame to get out of it.
SEND_PATIENCE_S = 0.05
#: How long the last words of a nearby peer, which has ceased to read, are waited for.
LAST_WORDS_S = 0.5
#: Of a link on which nothing may follow, as it would be taken for the rest of that.
BROKEN_OFF = "has got only a part of what was sent to it before"
#: Room before a staged payload: the header ends where an aligned payload begins.
_LEAD_BYTES = 64 - HEADER_BYTES


class LinkEnded(Exception):
    """The link is closed, or what came from it is refused. `orderly`: the peer said STOP, so it lives."""

    def __init__(self, link: Link, reason: str, *, orderly: bool = False) -> None:
        super().__init__(link.farewell or f"rank {link.peer} {reason}")
        self.link = link
        self.orderly = orderly


@dataclasses.dataclass(frozen=True, slots=True)
class LinkInfo:
    """A link as the operating system sees it: host and port of both ends, or (between processes of one host) "@name" and 0.
    `kind`: "tcp", "unix" or "shm"."""

    fd: int
    local: tuple[str, int]
    remote: tuple[str, int]
    kind: str


class Link:
    """See the module's contract. `peer` is a global rank; `epoch` the one that a hang-up would break."""

    __slots__ = (
        "__weakref__",
        "_closed",
        "_filled",
        "_head",
        "_head_view",
        "_out",
        "_payload",
        "_shut",
        "_staging",
        "_staging_view",
        "_using",
        "address",
        "epoch",
        "farewell",
        "fd",
        "held",
        "ignored",
        "peer",
        "saw_stop",
        "state",
        "stream",
        "timeout_s",
        "tx_lock",
    )

    def __init__(self, connection: Connection, *, peer: int, epoch: int, timeout_s: float) -> None:
        self.stream = stream_of(connection)
        self.fd = self.stream.state.fd
        self.peer = peer
        self.epoch = epoch
        #: Frames so far in each direction, what of the current one has not left, and whether this side has begun to close the
        #: link: shared with the native core, which finds it at `address`.
        self.state = self.stream.state
        self.address = self.stream.address
        self.tx_lock = threading.Lock()
        #: Guards `held` and the decision to close.
        self._using = threading.Lock()
        self.held = 0
        #: Nobody cares when it breaks: staged for a plan, or a leaver's after the flip.
        self.ignored = False
        #: Why its end is nobody's fault: one of its ends has left the group, or both.
        self.farewell = ""
        self.saw_stop = False
        #: This side has said all that it will; whoever used the link last closes the stream.
        self._shut = False
        self._closed = False
        self._out: list[memoryview] = []
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._payload = memoryview(b"")
        self._filled = 0
        self._staging = bytearray()
        self._staging_view = memoryview(self._staging)
        self.timeout_s = -1.0
        self.set_timeout(timeout_s)

    def info(self) -> LinkInfo:
        return LinkInfo(self.fd, self.stream.local, self.stream.remote, self.stream.kind)

    @property
    def ending(self) -> bool:
        """This side has begun to close it."""
        return bool(self.state.ending)

    def set_timeout(self, timeout_s: float) -> None:
        """How long a blocking receive waits for the peer (0: for ever), and a send for room."""
        if timeout_s != self.timeout_s:
            self.timeout_s = timeout_s
            self.state.timeout_ms = math.ceil(timeout_s * 1000)
            self.stream.limit_wait(timeout_s)

    # ---------------------------------------------------------------- sending

    def send(self, kind: Kind, epoch: int, payload: Buffer) -> None:
        """Sends one frame; returns once the kernel has all of it. Raises LinkEnded."""
        try:
            with self.tx_lock:
                self.begin_frame(kind, epoch, payload)
                # A poisoned buddy has closed its own direction alone, and reads its ward's records to their end.
                self.push_all(half_closed=kind in (Kind.RECORD, Kind.TAIL))
        finally:
            if self._shut:
                self._close_if_unused()

    def begin_frame(self, kind: Kind, epoch: int, payload: Buffer) -> None:
        """Makes this the current frame; `push` sends it. The caller has tx_lock. Raises LinkEnded."""
        if self.state.unsent:
            raise LinkEnded(self, BROKEN_OFF)
        size = len(payload)
        header = HEADER.pack(MAGIC, kind, epoch, self.state.sent, size)
        self.state.sent += 1
        self._out = [memoryview(header), memoryview(payload)]
        self.state.unsent = HEADER_BYTES + size
        if kind is Kind.DATA and size > 1 and faults.armed("frame"):
            self._send_half(header, memoryview(payload))

    def push(self) -> bool:
        """Sends what fits without waiting; True once the frame is out. Raises LinkEnded."""
        out = self._out
        if self.ending:
            raise LinkEnded(self, "was closed by this side")
        try:
            count = self.stream.write(out)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.ended(f"does not take data any more ({error.strerror})") from None
        self.state.unsent -= count
        if not self.state.unsent:
            self._out = []
            return True
        while out and count >= len(out[0]):
            count -= len(out.pop(0))
        out[0] = out[0][count:]
        return False

    def push_all(self, *, half_closed: bool = False) -> None:
        """Sends the current frame to its end, waiting for room. The caller has tx_lock. Raises LinkEnded.

        `half_closed`: goes on when the peer has closed its own direction.
        """
        if self.push():
            return
        wanted = select.POLLOUT if half_closed else select.POLLOUT | select.POLLRDHUP
        while not self.push():
            ready = wait_for([self.stream], [wanted], self.timeout_s)
            if not ready:
                raise LinkEnded(self, f"took no data for {self.timeout_s:.0f} s")
            if ready[0] & HANG_UP:
                raise self.ended("hung up")

    def _send_half(self, header: bytes, payload: memoryview) -> None:
        """For the fault point in the middle of a frame."""
        half = len(payload) // 2
        rest, self._out = payload[half:], [memoryview(header), payload[:half]]
        self.state.unsent = HEADER_BYTES + half
        self.push_all()
        self._out, self.state.unsent = [rest], len(rest)
        faults.point("frame")

    # ---------------------------------------------------------------- receiving

    def hold(self) -> None:
        """The calling thread is going to read: it will see the end of this link itself."""
        with self._using:
            self.held += 1

    def release(self) -> None:
        with self._using:
            self.held -= 1
        if self._shut:
            self._close_if_unused()

    def receive_small(self, kind: Kind, epoch: int, size_bytes: int) -> memoryview:
        """The payload of one frame in a buffer of this link that the next receive overwrites. Raises LinkEnded."""
        need = HEADER_BYTES + size_bytes
        if len(self._staging) < _LEAD_BYTES + need:
            self._staging = bytearray(_LEAD_BYTES + need)
            self._staging_view = memoryview(self._staging)
        frame = self._staging_view[_LEAD_BYTES : _LEAD_BYTES + need]
        filled = 0
        while filled < need:
            filled += self._read(frame[filled:] if filled else frame, socket.MSG_WAITALL)
            if filled >= HEADER_BYTES:
                self.check(frame, kind, epoch, size_bytes)
        self.state.received += 1
        return frame[HEADER_BYTES:]

    def receive(self, kind: Kind, epoch: int, payload: memoryview) -> None:
        """One frame of exactly this size, its payload straight into place. Raises LinkEnded."""
        self.expect(payload)
        while not self.pull(kind, epoch, socket.MSG_WAITALL):
            pass

    def receive_header(self) -> tuple[Kind, int, int, int]:
        """(kind, epoch, sequence, size) of a frame whose size is the sender's choice; `read_payload` follows."""
        filled = 0
        while filled < HEADER_BYTES:
            filled += self._read(self._head_view[filled:], socket.MSG_WAITALL)
        magic, kind, epoch, sequence, size = HEADER.unpack(self._head)
        if magic == MAGIC and kind == Kind.STOP:
            raise self._stopped()
        if magic != MAGIC or sequence != self.state.received or size > MAX_PAYLOAD_BYTES or kind not in Kind._value2member_map_:
            raise LinkEnded(self, f"sent a frame that cannot be read: {bytes(self._head).hex()}")
        self.state.received += 1
        return Kind(kind), epoch, sequence, size

    def read_payload(self, into: memoryview) -> None:
        """The bytes that a `receive_header` announced, or a part of them. Raises LinkEnded."""
        filled = 0
        while filled < len(into):
            filled += self._read(into[filled:], socket.MSG_WAITALL)

    def peek(self, into: memoryview) -> int:
        """How many bytes have come, up to the size of `into`, which holds them then; they stay unread. 0 also at the end. Not for
        links through memory."""
        try:
            return 0 if self._closed else self.stream.read(into, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def take(self, into: memoryview, frames: int) -> None:
        """Reads what `peek` has shown: so many whole frames. Raises LinkEnded."""
        self.read_payload(into)
        self.state.received += frames

    def expect(self, payload: memoryview) -> None:
        """Makes this the place of the next frame's payload; `pull` fills it."""
        self._payload = payload
        self._filled = -HEADER_BYTES

    def pull(self, kind: Kind, epoch: int, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Reads on; True once the frame is complete, False when there is nothing more for now. Raises LinkEnded."""
        while self._filled < 0:
            count = self._read(self._head_view[self._filled + HEADER_BYTES :], flags)
            if not count:
                return False
            self._filled += count
            if not self._filled:
                self.check(self._head_view, kind, epoch, len(self._payload))
        while self._filled < len(self._payload):
            count = self._read(self._payload[self._filled :], flags, self._payload[: self._filled])
            if not count:
                return False
            self._filled += count
        self.state.received += 1
        return True

    def _read(self, into: memoryview, flags: int, before: memoryview | None = None) -> int:
        """At least one byte; 0 only if `flags` says not to wait. `before`: what was read just before, in case it was a STOP."""
        if self._closed:
            raise LinkEnded(self, "was closed by this side")
        try:
            count = self.stream.read(into, flags)
        except BlockingIOError:
            if flags & socket.MSG_DONTWAIT:
                return 0
            raise LinkEnded(self, f"was silent for {self.timeout_s:.0f} s") from None
        except OSError as error:
            raise LinkEnded(self, f"broke the connection ({error.strerror})", orderly=self._is_stop(before)) from None
        if not count:
            raise LinkEnded(self, "closed the connection", orderly=self._is_stop(before))
        return count

    def check(self, header: memoryview, kind: Kind, epoch: int, size_bytes: int) -> None:
        """Raises LinkEnded or Desync unless this header is the one that comes next."""
        fields = HEADER.unpack_from(header)
        if fields[1] == Kind.STOP and fields[0] == MAGIC:
            raise self._stopped()
        try:
            check_header(fields, kind, epoch, self.state.received, size_bytes)
        except StaleFrame as refused:
            raise LinkEnded(self, str(refused)) from None

    # ---------------------------------------------------------------- the end

    def hung_up(self) -> bool:
        """True if the peer has closed, whether or not something is left to read."""
        return self.stream.hung_up()

    def ends_in_order(self) -> bool:
        """True if the last that the peer sent is a STOP. Only for a link that hung up; reads nothing away."""
        if self.saw_stop:
            return True
        with self._using:
            return not self._closed and self.stream.stop_said()

    def interrupt(self) -> None:
        """Wakes every thread that waits on this link; what was received already can still be read."""
        self.state.ending = True
        self.stream.shut(socket.SHUT_RD)

    def say_stop(self) -> None:
        """Tells the peer that this side lives and gives up, if that is possible without waiting long."""
        if not self.tx_lock.acquire(timeout=SEND_PATIENCE_S):
            return
        try:
            self.stream.say_stop()
        except OSError:
            pass  # best effort: the peer sees the end of the connection anyway
        finally:
            self.tx_lock.release()

    def shut(self, *, keep_reading: bool = False) -> None:
        """Closes the link. `keep_reading`: only this side's direction, until the reader is at its end and shuts the rest."""
        if keep_reading:
            self.stream.shut(socket.SHUT_WR)
            return
        self.state.ending = self._shut = True
        self.stream.shut(socket.SHUT_RDWR)
        self._close_if_unused()

    def close_copy(self) -> None:
        """In a forked child: closes the inherited descriptor without telling the peer."""
        self.state.ending = self._closed = True
        self.stream.close_copy()

    def _close_if_unused(self) -> None:
        if self.held or not self.tx_lock.acquire(timeout=SEND_PATIENCE_S):
            return  # whoever uses it closes it when done
        try:
            with self._using:
                if not self.held and not self._closed:
                    self._closed = True
                    self.stream.close()
        finally:
            self.tx_lock.release()

    def _stopped(self) -> LinkEnded:
        self.saw_stop = True
        return LinkEnded(self, "stopped: it is poisoned", orderly=True)

    def ended(self, reason: str) -> LinkEnded:
        """While sending: the peer's last words tell whether it lives."""
        if self.stream.nearby and not self.ending:
            self._await_last_words()
        return LinkEnded(self, reason, orderly=self.ends_in_order())

    def _await_last_words(self) -> None:
        """A peer that gives up ceases to read first, and only a socket within the host shows that before its STOP."""
        poll = select.poll()
        poll.register(self.fd, select.POLLRDHUP)
        poll.poll(LAST_WORDS_S * 1000)

    def _is_stop(self, before: memoryview | None) -> bool:
        """`before`: what was read last."""
        return bool(self.state.stopped) or (before is not None and before[-HEADER_BYTES:] == STOP_FRAME)


class Held:
    """In a `with` statement: the calling thread is going to use these links. Opening and closing it costs no generator."""

    __slots__ = ("_links",)

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links

    def __enter__(self) -> Mapping[int, Link]:
        for link in self._links.values():
            link.hold()
        return self._links

    def __exit__(self, *_: object) -> None:
        for link in self._links.values():
            link.release()
