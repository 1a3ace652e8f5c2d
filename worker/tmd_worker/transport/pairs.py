"""send/recv between two members of a group, over a link of its own that is opened when it is first used.

Each direction has a thread, so that two ranks that both send first do not wait for each other. Messages carry a tag; one
that comes before its receive is kept aside.
"""

from __future__ import annotations

import collections
import functools
import queue
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tmd_worker.transport.dialing import Cancelled
from tmd_worker.transport.group import Group, Guard, Refused, execute
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.opening import Attempt
from tmd_worker.transport.tensors import byte_view, flat, put_back, size_bytes
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind
from tmd_worker.transport.work import Operation

#: In front of every message: tag, size.
_PREFIX = struct.Struct("!qQ")
#: Messages kept aside for a later receive, all tags together.
MAX_ASIDE_BYTES = 256 << 20


class PairHost(Guard, Protocol):
    """What channels need of the fabric."""

    def open_pair(self, group: Group, label: str, peer: int, attempt: Attempt) -> Link:
        """Blocks until the peer wants to talk too. Raises LinkError or Cancelled."""


class PairChannel:
    """One peer in one group, from one epoch on. `open_link` blocks until the peer wants to talk too."""

    def __init__(self, guard: Guard, name: str, epoch: int, open_link: Callable[[], Link]) -> None:
        self._guard = guard
        self._name = name
        self.epoch = epoch
        self._open_link = open_link
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self.link: Link | None = None
        self._queues: dict[str, queue.SimpleQueue[tuple[Operation, Tensor, int] | None]] = {}
        self._aside: dict[int, collections.deque[bytearray]] = collections.defaultdict(collections.deque)
        self._aside_bytes = 0

    def send(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        self._put("send", self._send_one, (operation, tensor, tag))

    def receive(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        self._put("receive", self._receive_one, (operation, tensor, tag))

    def end_threads(self) -> None:
        with self._lock:
            for waiting in self._queues.values():
                waiting.put(None)

    def _put(self, way: str, run_one: Callable[[Link, Tensor, int], None], item: tuple[Operation, Tensor, int]) -> None:
        with self._lock:
            waiting = self._queues.get(way)
            if waiting is None:
                waiting = self._queues[way] = queue.SimpleQueue()
                self._guard.spawn(f"{way}-{self._name}", lambda: self._run(self._queues[way], run_one))
        waiting.put(item)

    def _run(
        self,
        waiting: queue.SimpleQueue[tuple[Operation, Tensor, int] | None],
        run_one: Callable[[Link, Tensor, int], None],
    ) -> None:
        while (item := waiting.get()) is not None:
            operation, tensor, tag = item
            action = functools.partial(self._run_one, run_one, tensor, tag)
            execute(self._guard, operation, self.epoch, action)

    def _run_one(self, run_one: Callable[[Link, Tensor, int], None], tensor: Tensor, tag: int) -> None:
        run_one(self._opened(), tensor, tag)

    def _opened(self) -> Link:
        """Whichever direction comes first opens it."""
        with self._opening:
            if self.link is None:
                self.link = self._open_link()
                if self._guard.is_closed(self.epoch):
                    self.link.shut()
                    raise Cancelled(f"epoch {self.epoch} was closed while the link was being opened")
            return self.link

    def go_on(self, epoch: int) -> None:
        """The same link, in the epoch after a flip."""
        self.epoch = epoch
        if self.link is not None:
            self.link.epoch = epoch

    def _send_one(self, link: Link, tensor: Tensor, tag: int) -> None:
        data = byte_view(flat(tensor))
        link.send(Kind.MESSAGE, link.epoch, _PREFIX.pack(tag, len(data)))
        for start in range(0, len(data), MAX_PAYLOAD_BYTES):
            link.send(Kind.DATA, link.epoch, data[start : start + MAX_PAYLOAD_BYTES])

    def _receive_one(self, link: Link, tensor: Tensor, tag: int) -> None:
        target = flat(tensor)
        link.hold()
        try:
            kept = self._aside[tag].popleft() if self._aside[tag] else None
            if kept is not None:
                self._aside_bytes -= len(kept)
                if len(kept) != size_bytes(target):
                    raise _size_differs(len(kept), size_bytes(target), tag)
                byte_view(target)[:] = kept
            else:
                self._receive_from(link, byte_view(target), tag)
        finally:
            link.release()
        put_back(target, tensor)

    def _receive_from(self, link: Link, target: memoryview, tag: int) -> None:
        """Reads messages until the one with this tag; the others are kept aside."""
        while True:
            its_tag, size = self._read_prefix(link, link.receive_header())
            if its_tag == tag and size == len(target):
                _read_data(link, target)
                return
            if self._aside_bytes + size > MAX_ASIDE_BYTES:
                raise LinkEnded(link, f"sent more than {MAX_ASIDE_BYTES} bytes with tags that nobody receives")
            message = bytearray(size)
            _read_data(link, memoryview(message))
            if its_tag == tag:
                raise _size_differs(size, len(target), tag)
            self._aside[its_tag].append(message)
            self._aside_bytes += size

    @staticmethod
    def _read_prefix(link: Link, header: tuple[Kind, int, int, int]) -> tuple[int, int]:
        kind, epoch, _, size = header
        if kind is not Kind.MESSAGE or size != _PREFIX.size:
            raise LinkEnded(link, f"sent a {kind.name} frame of {size} bytes where a message begins")
        if epoch != link.epoch:
            raise LinkEnded(link, f"sent a message of epoch {epoch} in epoch {link.epoch}")
        prefix = bytearray(_PREFIX.size)
        link.read_payload(memoryview(prefix))
        tag, message_bytes = _PREFIX.unpack(prefix)
        return tag, message_bytes


def _read_data(link: Link, into: memoryview) -> None:
    for start in range(0, len(into), MAX_PAYLOAD_BYTES):
        link.receive(Kind.DATA, link.epoch, into[start : start + MAX_PAYLOAD_BYTES])


def _size_differs(sent: int, expected: int, tag: int) -> Refused:
    return Refused(f"the message with tag {tag} has {sent} bytes, the tensor to receive into {expected}")


class PairBook:
    """All pair channels of a process, by group and peer; the fabric tells it when epochs change."""

    def __init__(self, host: PairHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, int], PairChannel] = {}

    def channel(self, group: Group, epoch: int, place: int) -> PairChannel:
        """The channel to the member with this group rank; made now if it is the first time in this epoch."""
        peer = group.ranks[place]
        label = f"{group.name}#pair"
        with self._lock:
            channel = self._channels.get((label, peer))
            if channel is None:
                attempt = Attempt(epoch, group.timeout_s)
                channel = PairChannel(
                    self._host, f"{label}-{peer}", epoch, lambda: self._host.open_pair(group, label, peer, attempt)
                )
                self._channels[label, peer] = channel
            return channel

    def switch(self, epoch: int, leavers: frozenset[int]) -> list[Link]:
        """Kept channels go on in this epoch; returns the links to leavers, whose channels end."""
        replaced = []
        with self._lock:
            for key, channel in list(self._channels.items()):
                if key[1] in leavers:
                    replaced += self._end(key)
                else:
                    channel.go_on(epoch)
        return replaced

    def close(self, epoch: int) -> list[Link]:
        """Channels of epochs up to this one end; returns their links."""
        with self._lock:
            return [link for key in list(self._channels) if self._channels[key].epoch <= epoch for link in self._end(key)]

    def links(self) -> dict[str, dict[int, Link]]:
        """Label -> peer's global rank -> link."""
        found: dict[str, dict[int, Link]] = {}
        for (label, peer), channel in list(self._channels.items()):
            if channel.link is not None:
                found.setdefault(label, {})[peer] = channel.link
        return found

    def _end(self, key: tuple[str, int]) -> list[Link]:
        channel = self._channels.pop(key)
        channel.end_threads()
        return [channel.link] if channel.link is not None else []
