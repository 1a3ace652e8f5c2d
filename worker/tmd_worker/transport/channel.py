"""send/recv with one peer of a group, over a link of its own that is opened when it is first used.

Two threads, one for each direction, so that two ranks that both send first do not wait for each other. What comes is read only
while somebody waits for a message of this peer: until then it stays with the sender.
"""

from __future__ import annotations

import functools
import queue
import select
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tmd_worker.transport.dialing import Cancelled, LinkError
from tmd_worker.transport.group import Group, Guard, Refused, execute
from tmd_worker.transport.labels import PAIR
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.mailbox import Mailbox, MailboxFull, Message, Receive
from tmd_worker.transport.opening import Attempt
from tmd_worker.transport.tensors import byte_view, flat, put_back, size_bytes
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind
from tmd_worker.transport.work import Operation

#: In front of every message: tag, size.
_PREFIX = struct.Struct("!qQ")
#: Nobody waits longer than this for anything without looking again.
_LONGEST_WAIT_S = 60.0
#: How long the word that an epoch is over may come after a peer's refusal.
_NEWS_S = 0.5
_NEWS_STEP_S = 0.005


class PairHost(Guard, Protocol):
    """What pairs need of the fabric."""

    def open_pair(self, group: Group, label: str, peer: int, attempt: Attempt, *, shares: bool) -> Link:
        """Blocks until the peer wants to talk too. `shares`: see Group. Raises LinkError or Cancelled."""

    def pair_opened(self, group: Group, use: str, peer: int, link: Link) -> None:
        """Told once whoever leaves the group would find this link, which is watched from then on. Takes it and raises GroupGone
        if the group was left before."""

    def opening_failed(self, epoch: int, error: LinkError) -> None:
        """Tells the runtime that a link of this epoch could not be opened, unless the epoch is over."""


class Channel:
    """One peer, from one epoch on. `open_link(epoch)` may block until the peer wants to talk too; it raises LinkError."""

    def __init__(
        self,
        host: PairHost,
        group: Group,
        place: int,
        epoch: int,
        mailbox: Mailbox,
        open_link: Callable[[int], Link],
    ) -> None:
        self._host = host
        self._group = group
        self._peer = group.ranks[place]
        self._name = f"{group.name}-{self._peer}"
        self._place = place
        self.epoch = epoch
        self._mailbox = mailbox
        self._timeout_s = group.timeout_s
        self._open_link = open_link
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        #: Guards link and epoch, for a flip.
        self._flipping = threading.Lock()
        self.link: Link | None = None
        self._sends: queue.SimpleQueue[tuple[Operation, Tensor, int] | None] = queue.SimpleQueue()
        self._sending = False
        self._reading = False
        self._ended = False
        #: Everything that was to be sent has been.
        self._sent = threading.Event()
        #: Tag and size of a message whose bytes have not been read, because nobody waits for one.
        self._announced: tuple[int, int] | None = None
        #: How many monitored barriers were begun with this peer, on this side.
        self.barriers = 0

    # ---------------------------------------------------------------- from outside

    def send(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        with self._lock:
            if not self._sending:
                self._sending = True
                self._host.spawn(f"send-{self._name}", self._run_sends)
        self._sends.put((operation, tensor, tag))

    def listen(self) -> None:
        """From now on messages of this peer are read when somebody waits for one."""
        with self._lock:
            if not self._reading:
                self._reading = True
                self._host.spawn(f"receive-{self._name}", self._run_reader)

    def go_on(self, epoch: int) -> None:
        """The same link, in the epoch after a flip."""
        with self._flipping:
            self.epoch = epoch
            if self.link is not None:
                self.link.epoch = epoch

    def finish(self, wait_s: float) -> None:
        """Nothing more is to be sent: waits until the rest is out, or for so long."""
        with self._lock:
            sending = self._sending
        self._sends.put(None)
        if sending:
            self._sent.wait(wait_s)

    def end(self) -> None:
        """The threads end once their link or the mailbox is closed."""
        self._ended = True
        self._sends.put(None)

    # ---------------------------------------------------------------- the link

    def _opened(self) -> Link:
        """Whichever direction comes first opens it. Raises LinkError, or Cancelled once the epoch is closed."""
        with self._opening:
            while self.link is None:
                epoch = self.epoch
                try:
                    link = self._open_link(epoch)
                except LinkError:
                    self._wait_for_news(epoch)
                    if self._ended or self.epoch == epoch:
                        raise
                    continue  # a flip came in between: the same link, under the new number
                with self._flipping:
                    link.epoch = self.epoch
                    self.link = link
                if self._host.is_closed(self.epoch):
                    link.shut()
                    raise Cancelled(f"epoch {self.epoch} was closed while the link was being opened")
                self._host.pair_opened(self._group, PAIR, self._peer, link)
            return self.link

    def _wait_for_news(self, epoch: int) -> None:
        """The peer may have refused because it knows already that this epoch is over."""
        deadline_s = time.monotonic() + _NEWS_S
        while self.epoch == epoch and not self._host.is_closed(epoch) and time.monotonic() < deadline_s:
            time.sleep(_NEWS_STEP_S)

    # ---------------------------------------------------------------- sending

    def _run_sends(self) -> None:
        while (item := self._sends.get()) is not None:
            operation, tensor, tag = item
            execute(self._host, operation, self.epoch, functools.partial(self._send_one, tensor, tag))
        self._sent.set()

    def _send_one(self, tensor: Tensor, tag: int) -> None:
        try:
            link = self._opened()
        except LinkError as error:
            self._host.opening_failed(self.epoch, error)
            raise
        data = byte_view(flat(tensor))
        link.send(Kind.MESSAGE, link.epoch, _PREFIX.pack(tag, len(data)))
        for start in range(0, len(data), MAX_PAYLOAD_BYTES):
            link.send(Kind.DATA, link.epoch, data[start : start + MAX_PAYLOAD_BYTES])

    # ---------------------------------------------------------------- receiving

    def _run_reader(self) -> None:
        while self._mailbox.wait_wanted(self._place) and not self._ended:
            began_s = time.monotonic()
            try:
                self._read(self._opened())
            except LinkEnded as ended:
                if self._ended:
                    return  # whoever ended it has seen to those who waited
                hopeless = self._mailbox.lose(self._place)
                self._host.link_ended(ended.link, str(ended), orderly=ended.orderly)
                self._give_up(hopeless, ended)
            except LinkError as error:
                if self._ended:
                    return
                late = self._timeout_s and time.monotonic() - began_s >= self._timeout_s
                self._could_not_open(error, late=bool(late))

    def _could_not_open(self, error: LinkError, *, late: bool) -> None:
        """`late`: the peer has not wanted to talk so far, which only those may hold against it who named it."""
        if late:
            overdue = self._mailbox.expire(self._place)
            hopeless = overdue + self._mailbox.expire(None)
        else:
            hopeless = self._mailbox.lose(self._place)
        if not late or overdue:
            self._host.opening_failed(self.epoch, error)
        self._give_up(hopeless, error)

    def _give_up(self, receives: list[Receive], error: LinkEnded | LinkError) -> None:
        for receive in receives:
            execute(self._host, receive.operation, self.epoch, functools.partial(_raise, error))

    def _read(self, link: Link) -> None:
        """One message, or none if nobody waits for one any more. Raises LinkEnded."""
        link.hold()
        try:
            if self._announced is None:
                if not self._await_message(link):
                    return
                self._announced = self._read_prefix(link)
            tag, size = self._announced
            receive = self._mailbox.claim(self._place, tag)
            if receive is not None:
                self._announced = None
                self._fill(link, receive, size)
            elif self._mailbox.deadline(self._place) is not None:
                self._announced = None
                self._keep(link, tag, size)
        finally:
            link.release()

    def _await_message(self, link: Link) -> bool:
        """Until there is something to read, also the end of the link; False if nobody waits for a message any more."""
        if link.ending:
            raise LinkEnded(link, "was closed by this side")
        poll = select.poll()
        poll.register(link.fd, select.POLLIN | select.POLLRDHUP)
        while not self._ended and (deadline_s := self._mailbox.deadline(self._place)) is not None:
            left_s = min(deadline_s - time.monotonic(), _LONGEST_WAIT_S)
            if left_s <= 0:
                self._expire(link)
            elif poll.poll(left_s * 1000):
                return True
        return False

    def _expire(self, link: Link) -> None:
        """A sender who is silent for too long breaks its link; if anybody might have sent, nobody is to blame."""
        for receive in self._mailbox.expire(None):
            receive.operation.fail(f"nobody sent a message with tag {receive.tag} within {self._timeout_s:.0f} s")
        overdue = self._mailbox.expire(self._place)
        if overdue:
            silent = LinkEnded(link, f"was silent for {self._timeout_s:.0f} s")
            self._give_up(overdue, silent)
            raise silent

    def _fill(self, link: Link, receive: Receive, size: int) -> None:
        """Straight into the tensor. Raises LinkEnded once the receive has ended as well."""
        broken: list[LinkEnded] = []

        def action() -> None:
            try:
                self._read_into(link, receive, size)
                _record(self._host, receive.operation)
            except LinkEnded as ended:
                broken.append(ended)
                raise

        receive.operation.work.source = self._place
        execute(self._host, receive.operation, self.epoch, action)
        if broken:
            raise broken[0]

    @staticmethod
    def _read_into(link: Link, receive: Receive, size: int) -> None:
        target = flat(receive.tensor)
        if size != size_bytes(target):
            _read_data(link, memoryview(bytearray(size)))
            raise _size_differs(size, size_bytes(target), receive.tag)
        _read_data(link, byte_view(target))
        put_back(target, receive.tensor)

    def _keep(self, link: Link, tag: int, size: int) -> None:
        try:
            self._mailbox.reserve(size)
        except MailboxFull as full:
            raise LinkEnded(link, str(full)) from None
        message = Message(self._place, tag, bytearray(size))
        _read_data(link, memoryview(message.data))
        receive = self._mailbox.keep(message)
        if receive is not None:
            deliver(self._host, self.epoch, receive, message)

    @staticmethod
    def _read_prefix(link: Link) -> tuple[int, int]:
        kind, epoch, _, size = link.receive_header()
        if kind is not Kind.MESSAGE or size != _PREFIX.size:
            raise LinkEnded(link, f"sent a {kind.name} frame of {size} bytes where a message begins")
        if epoch != link.epoch:
            raise LinkEnded(link, f"sent a message of epoch {epoch} in epoch {link.epoch}")
        prefix = bytearray(_PREFIX.size)
        link.read_payload(memoryview(prefix))
        tag, message_bytes = _PREFIX.unpack(prefix)
        return tag, message_bytes


def deliver(guard: Guard, epoch: int, receive: Receive, message: Message) -> None:
    """Ends a receive with a message that was kept."""

    def action() -> None:
        target = flat(receive.tensor)
        if len(message.data) != size_bytes(target):
            raise _size_differs(len(message.data), size_bytes(target), receive.tag)
        byte_view(target)[:] = message.data
        put_back(target, receive.tensor)
        _record(guard, receive.operation)

    receive.operation.work.source = message.source
    execute(guard, receive.operation, epoch, action)


def _record(guard: Guard, operation: Operation) -> None:
    if guard.recorder is not None and operation.series:
        guard.recorder.add(operation.series, operation.index, operation.name, operation.outputs)


def _read_data(link: Link, into: memoryview) -> None:
    for start in range(0, len(into), MAX_PAYLOAD_BYTES):
        link.receive(Kind.DATA, link.epoch, into[start : start + MAX_PAYLOAD_BYTES])


def _size_differs(sent: int, expected: int, tag: int) -> Refused:
    return Refused(f"the message with tag {tag} has {sent} bytes, the tensor to receive into {expected}")


def _raise(error: BaseException) -> None:
    raise error
