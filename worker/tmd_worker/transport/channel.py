"""send/recv with one peer of a group, over a link of its own that is opened when it is first used.

The directions have a thread each, so that two ranks that both send first do not wait for each other. What comes is read only
while somebody waits for a message of this peer: until then it stays with the sender.
"""

from __future__ import annotations

import fcntl
import functools
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tmd_worker.transport import native
from tmd_worker.transport.dialing import Cancelled, LinkError
from tmd_worker.transport.group import Group, Guard, Refused, execute, failed_in_caller
from tmd_worker.transport.labels import PAIR
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.mailbox import Mailbox, MailboxFull, Message, Receive
from tmd_worker.transport.opening import Attempt
from tmd_worker.transport.outbox import PREFIX, Outbox, OutboxHost
from tmd_worker.transport.tensors import byte_view, flat, put_back, size_bytes
from tmd_worker.transport.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES, Kind
from tmd_worker.transport.work import Operation

#: Messages up to this size are received in the thread of the caller, if they are there when it calls.
_HERE_BYTES = 64 << 10
#: Nobody waits longer than this for anything without looking again.
_LONGEST_WAIT_S = 60.0
#: How long the word that an epoch is over may come after a peer's refusal.
_NEWS_S = 0.5
_NEWS_STEP_S = 0.005


class PairHost(OutboxHost, Protocol):
    """What pairs need of the fabric."""

    def open_pair(self, group: Group, label: str, peer: int, attempt: Attempt, *, shares: bool) -> Link:
        """Blocks until the peer wants to talk too. `shares`: see Group. Raises LinkError or Cancelled."""

    def pair_opened(self, group: Group, use: str, peer: int, link: Link) -> None:
        """Told once whoever leaves the group would find this link, which is watched from then on. Takes it and raises GroupGone
        if the group was left before."""


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
        self._outbox = Outbox(host, self._name, lambda: self.epoch, self._opened, lambda: self.link)
        self._reading = False
        #: Whoever reads from the link has it.
        self._turn = threading.Lock()
        self._ended = False
        #: Tag and size of a message whose bytes have not been read, because nobody waits for one.
        self._announced: tuple[int, int] | None = None
        self._front = memoryview(bytearray(HEADER_BYTES + PREFIX.size))
        #: How many monitored barriers were begun with this peer, on this side.
        self.barriers = 0

    # ---------------------------------------------------------------- from outside

    def send(self, operation: Operation, tensor: Tensor, tag: int) -> None:
        self._outbox.send(operation, tensor, tag)

    def listen(self) -> None:
        """From now on messages of this peer are read when somebody waits for one."""
        with self._lock:
            if not self._reading:
                self._reading = True
                self._host.spawn(f"receive-{self._name}", self._run_reader)

    def take(self, operation: Operation) -> bool:
        """Reads the small messages that are there, in the thread of the caller, until this receive has ended; True if it has. It
        saves two changes of thread."""
        link = self.link
        if link is None or self._ended or not self._turn.acquire(blocking=False):
            return False
        try:
            while not operation.work.is_completed() and self._is_there(link):
                self._read(link)
        except LinkEnded as ended:
            self._lost(ended)
        except BaseException as error:
            failed_in_caller(self._host, operation, self.epoch, error)
            raise
        finally:
            self._turn.release()
        return operation.work.is_completed()

    def go_on(self, epoch: int) -> None:
        """The same link, in the epoch after a flip."""
        with self._flipping:
            self.epoch = epoch
            if self.link is not None:
                self.link.epoch = epoch

    def finish(self, wait_s: float) -> None:
        """Nothing more is to be sent: waits until the rest is out, or for so long."""
        self._outbox.finish(wait_s)

    def end(self) -> None:
        """The threads end once their link or the mailbox is closed."""
        self._ended = True
        self._outbox.end()

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

    # ---------------------------------------------------------------- receiving

    def _run_reader(self) -> None:
        while self._mailbox.wait_wanted(self._place) and not self._ended:
            began_s = time.monotonic()
            try:
                link = self._opened()
                with self._turn:
                    self._read(link)
            except LinkEnded as ended:
                if self._ended:
                    return
                self._lost(ended)
            except LinkError as error:
                if self._ended:
                    return
                late = self._timeout_s and time.monotonic() - began_s >= self._timeout_s
                self._could_not_open(error, late=bool(late))

    def _lost(self, ended: LinkEnded) -> None:
        if not self._ended:  # else whoever ended it has seen to those who waited
            hopeless = self._mailbox.lose(self._place)
            self._host.link_ended(ended.link, str(ended), orderly=ended.orderly)
            self._give_up(hopeless, ended)

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

    def _is_there(self, link: Link) -> bool:
        """A small message has come whole, so reading it waits for nobody. Whoever asks has the turn."""
        front, announced = 0, self._announced
        link.hold()
        try:
            if announced is None:
                front = HEADER_BYTES + PREFIX.size
                if link.peek(self._front) < front:
                    return False
                announced = PREFIX.unpack_from(
                    self._front, HEADER_BYTES
                )  # of something else if it is no message: its reader sees that
            size = announced[1]
            whole = front + size + (HEADER_BYTES if size else 0)
            return size <= _HERE_BYTES and struct.unpack("i", fcntl.ioctl(link.fd, termios.FIONREAD, bytes(4)))[0] >= whole
        except OSError:
            return False  # closed meanwhile
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
        try:
            execute(self._host, receive.operation, self.epoch, action)
        finally:
            if not receive.operation.work.is_completed():  # a signal's handler has raised
                receive.operation.fail("it was interrupted on this rank")
        if broken:
            raise broken[0]

    @staticmethod
    def _read_into(link: Link, receive: Receive, size: int) -> None:
        target = flat(receive.tensor)
        if size != size_bytes(target):
            _read_data(link, memoryview(bytearray(size)))
            raise _size_differs(size, size_bytes(target), receive.tag)
        if not native.exchange_all([], [(link, target)], link.epoch):
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
        prefix = bytearray(PREFIX.size)
        came = native.receive_message(link, prefix)
        if came is None:
            kind, epoch, _, size = link.receive_header()
        else:
            kind, epoch, size = came
        if kind is not Kind.MESSAGE or size != PREFIX.size:
            raise LinkEnded(link, f"sent a {kind.name} frame of {size} bytes where a message begins")
        if epoch != link.epoch:
            raise LinkEnded(link, f"sent a message of epoch {epoch} in epoch {link.epoch}")
        if came is None:
            link.read_payload(memoryview(prefix))
        tag, message_bytes = PREFIX.unpack(prefix)
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
