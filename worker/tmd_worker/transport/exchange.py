"""Full-duplex transfers in one thread: between a link to send on and a link to receive from, or among many."""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Sequence

from torch import Tensor

from tmd_worker.transport import native
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.stream import HANG_UP, Stream, wait_for
from tmd_worker.transport.tensors import byte_view
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind


def exchange(
    out: Link,
    outgoing: list[memoryview],
    source: Link,
    incoming: list[memoryview],
    epoch: int,
    on_frame: Callable[[int], None] | None = None,
) -> None:
    """Sends frames (at most 1 MiB each) to one link while it receives frames from another, or from the same one.

    `on_frame(i)` is called as soon as incoming frame i is complete. Raises LinkEnded.
    """
    with out.tx_lock:
        if on_frame is None and native.exchange(out, outgoing, source, incoming, epoch):
            return
        _Exchange(out, outgoing, source, incoming, epoch, on_frame).run()


def exchange_all(outgoing: Sequence[tuple[Link, Tensor]], incoming: Sequence[tuple[Link, Tensor]], epoch: int) -> None:
    """Sends each tensor (contiguous) to its link, and receives each from its link, in this order. No two of either have the same
    link. Raises LinkEnded.

    Links take what they have room for, in the native core. In Python the n-th goes out while the n-th comes in, so nobody waits
    in a circle if those who exchange are at the same place in one another's order.
    """
    if native.exchange_all(outgoing, incoming, epoch):
        return
    for sent, received in itertools.zip_longest(outgoing, incoming):
        out = [] if sent is None else frames(byte_view(sent[1]))
        room = [] if received is None else frames(byte_view(received[1]))
        target, _ = sent or received
        source, _ = received or sent
        exchange(target, out, source, room, epoch)


def frames(data: memoryview) -> list[memoryview]:
    """At most 1 MiB each; none for no data."""
    return [data[start : start + MAX_PAYLOAD_BYTES] for start in range(0, len(data), MAX_PAYLOAD_BYTES)]


class _Exchange:
    """A full-duplex transfer in one thread: whichever direction can go on goes on."""

    def __init__(
        self,
        out: Link,
        outgoing: list[memoryview],
        source: Link,
        incoming: list[memoryview],
        epoch: int,
        on_frame: Callable[[int], None] | None,
    ) -> None:
        self._out, self._outgoing = out, outgoing
        self._source, self._incoming = source, incoming
        self._epoch, self._on_frame = epoch, on_frame
        self._begun = 0
        self._arrived = 0
        self._sending = False

    def run(self) -> None:
        if self._incoming:
            self._source.expect(self._incoming[0])
        while True:
            sent = self._send()
            got = self._receive()
            if self._done_sending() and self._arrived == len(self._incoming):
                return
            if not sent and not got:
                self._wait()

    def _done_sending(self) -> bool:
        return not self._sending and self._begun == len(self._outgoing)

    def _send(self) -> bool:
        """Pushes frames until the kernel takes no more; True if a frame went out."""
        progress = False
        while not self._done_sending():
            if not self._sending:
                self._out.begin_frame(Kind.DATA, self._epoch, self._outgoing[self._begun])
                self._begun += 1
                self._sending = True
            if not self._out.push():
                break
            self._sending = False
            progress = True
        return progress

    def _receive(self) -> bool:
        """Takes one frame if it is there; True if one was completed."""
        if self._arrived == len(self._incoming) or not self._source.pull(Kind.DATA, self._epoch):
            return False
        number = self._arrived
        self._arrived += 1
        if self._on_frame is not None:
            self._on_frame(number)
        if self._arrived < len(self._incoming):
            self._source.expect(self._incoming[self._arrived])
        return True

    def _wait(self) -> None:
        wanted: dict[Stream, int] = {}
        if not self._done_sending():
            wanted[self._out.stream] = select.POLLOUT | select.POLLRDHUP
        if self._arrived < len(self._incoming):
            wanted[self._source.stream] = wanted.get(self._source.stream, 0) | select.POLLIN
        timeout_s = self._source.timeout_s
        ready = dict(zip(wanted, wait_for(list(wanted), list(wanted.values()), timeout_s), strict=False))
        if not ready:
            raise LinkEnded(self._source, f"neither took nor sent data for {timeout_s:.0f} s")
        events = ready.get(self._out.stream, 0)
        if events & HANG_UP and not events & select.POLLIN:
            raise self._out.ended("hung up")
