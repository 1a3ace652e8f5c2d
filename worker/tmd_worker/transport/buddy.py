"""The records of small state: this rank's go to its buddy, its ward's are kept here.

Two generations (steps) are kept. A ward's link is read to its end, also after this process is poisoned, because what the ward
said last is what its replacement needs.
"""

from __future__ import annotations

import dataclasses
import threading
import time

from tmd.protocol.membership import buddy_of, ward_of
from tmd_worker import faults
from tmd_worker.transport.group import Guard
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.ward import MAX_RECORD_BYTES, PREFIX, SMALL_BYTES, Message, Wake, WardLink
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind

#: How long the end of a ward's link is waited for after poison.
DRAIN_S = 1.0


@dataclasses.dataclass(slots=True)
class _Generation:
    """What the ward sent about one step, and the epoch of that attempt."""

    epoch: int
    record: bytes
    tail: bytes | None = None


class BuddyChannel:
    """The links to the buddy and from the ward, which may be the same rank, or this one itself when it is alone."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._changed = threading.Condition()
        self._rank = self._buddy = self._ward = 0
        #: Epoch -> links by global rank, for the live epoch and those that are opened.
        self._links: dict[int, dict[int, Link]] = {}
        self._live_epoch = -1
        self._closed_epoch = -1
        #: Ward links that are not at their end, and what ends the main thread's wait on one.
        self._wards: dict[Link, WardLink] = {}
        self._wake = Wake()
        self._generations: dict[int, _Generation] = {}
        self._had_tails = False

    # ---------------------------------------------------------------- for the session

    def send(self, kind: Kind, step: int, payload: bytes, *, epoch: int | None = None) -> None:
        """Sends a RECORD or TAIL to the buddy; returns once the kernel has it. Does nothing when poisoned.

        `epoch`: through the links opened for an epoch that is not active yet; default: the live one. Raises ValueError for
        more than MAX_RECORD_BYTES.
        """
        if len(payload) > MAX_RECORD_BYTES:
            raise ValueError(
                f"the small state of a step has {len(payload)} bytes, the limit is {MAX_RECORD_BYTES}; "
                "track large tensors as state instead of as buffers"
            )
        epoch = self._live_epoch if epoch is None else epoch
        if self._buddy == self._rank:
            self._keep(Message(kind, epoch, step, payload))
            return
        if len(payload) > SMALL_BYTES:  # then the ward's are, too, and must be read while this rank waits for room
            self._recall_readers()
        link = self._links.get(epoch, {}).get(self._buddy)
        if link is None:
            return
        message = memoryview(PREFIX.pack(step, len(payload)) + payload)
        try:
            for start in range(0, len(message), MAX_PAYLOAD_BYTES):
                link.send(kind, epoch, message[start : start + MAX_PAYLOAD_BYTES])
        except LinkEnded as ended:
            self._guard.link_ended(link, str(ended), orderly=ended.orderly)
            return
        if kind is Kind.RECORD:
            faults.point("record.sent")

    def wait_for(self, step: int, deadline_s: float) -> bool:
        """True once the ward's RECORD of this step, sent in the live epoch, is here; False when poisoned.

        A deadline that passes breaks the link to the ward first, so False always means poisoned.
        """
        epoch = self._live_epoch
        with self._wake:
            self._await_record(step, epoch, time.monotonic() + deadline_s)
        with self._changed:
            if self._closed_epoch >= epoch:
                return False
            here = self._has(step, epoch)
            link = self._links.get(epoch, {}).get(self._ward)
        if here:
            faults.point("record.held")
        elif link is not None:
            self._guard.link_ended(link, f"rank {self._ward} sent no record of step {step} in time", orderly=False)
        return here

    def _await_record(self, step: int, epoch: int, deadline_s: float) -> None:
        while (left_s := deadline_s - time.monotonic()) > 0:
            with self._changed:
                if self._decided(step, epoch):
                    return
                link = self._links.get(epoch, {}).get(self._ward)
                ward = None if link is None else self._wards.get(link)
                if ward is None or not ward.lent:
                    self._changed.wait(left_s)
                    continue
            ward.receive(left_s, lambda: self._decided(step, epoch))

    def ward_records(self, step: int) -> tuple[bytes, bytes | None, bool] | None:
        """(record, tail or None, whether this ward ever sent a tail) of this step, or None.

        After poison it waits (bounded) until the ward's link is read to its end, before that until what has come is read.
        """
        deadline_s = time.monotonic() + DRAIN_S
        with self._changed:
            while any(self._guard.is_closed(link.epoch) or ward.behind() for link, ward in self._wards.items()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            generation = self._generations.get(step)
            return None if generation is None else (generation.record, generation.tail, self._had_tails)

    # ---------------------------------------------------------------- for the fabric

    def take_role(self, rank: int, world_size: int, nproc_per_node: int) -> None:
        """Forgets what another role's ward sent."""
        with self._changed:
            if (rank, buddy_of(rank, world_size, nproc_per_node)) != (self._rank, self._buddy):
                self._generations.clear()
                self._had_tails = False
            self._rank = rank
            self._buddy = buddy_of(rank, world_size, nproc_per_node)
            self._ward = ward_of(rank, world_size, nproc_per_node)

    def adopt(self, epoch: int, links: dict[int, Link]) -> Link | None:
        """New links of an epoch, which may be ahead. Returns the ward's, which is read (and so watched) from now on."""
        with self._changed:
            self._links[epoch] = {**self._links.get(epoch, {}), **links}
            ward = links.get(self._ward)
            if ward is None:
                return None
            reader = WardLink(ward, self._guard, self._wake, keep=self._keep, lends=self._notify)
            self._wards[ward] = reader
            ward.hold()
        ward.set_timeout(0)
        self._guard.spawn(f"ward-{epoch}", lambda: self._read(reader))
        return ward

    def activate(self, epoch: int, links: dict[int, Link]) -> None:
        """These are the live ones; readers that still wait for the end of an older epoch's link give up."""
        with self._changed:
            self._links[epoch] = links
            self._live_epoch = epoch
            for older in [older for older in self._links if older < epoch]:
                del self._links[older]
            late = [link for link in self._wards if self._guard.is_closed(link.epoch)]
            self._changed.notify_all()
        for link in late:
            link.interrupt()  # its reader has it already: nothing of a closed epoch is lent

    def forget(self, epoch: int) -> None:
        """The links that were opened for an epoch ahead are closed by now."""
        with self._changed:
            if epoch != self._live_epoch:
                self._links.pop(epoch, None)

    def close(self, epoch: int) -> None:
        """Wakes whoever waits for a record."""
        with self._changed:
            self._closed_epoch = max(self._closed_epoch, epoch)
            for older in [older for older in self._links if older <= epoch]:
                del self._links[older]
            for link, ward in self._wards.items():
                if link.epoch <= epoch:
                    ward.end_lending()
            self._changed.notify_all()
        self._wake.ring()

    def end(self) -> None:
        """Nothing is waited for any more."""
        with self._changed:
            links = list(self._wards)
        for link in links:
            self.interrupt(link)
        self._wake.close()

    def is_read(self, link: Link) -> bool:
        """A ward's link: it is to be closed in one direction only, so that its end is still heard."""
        return link in self._wards

    def interrupt(self, link: Link) -> None:
        """Ends the reading of a link, if it is a ward's: its end is not to be heard."""
        link.interrupt()
        with self._changed:
            ward = self._wards.get(link)
        if ward is not None:
            ward.end_lending()
            self._wake.ring()

    # ---------------------------------------------------------------- what the ward sends

    def _read(self, ward: WardLink) -> None:
        """The body of the thread that reads this link, which is held for it."""
        link = ward.link
        try:
            ward.read()
            with self._changed:
                del self._wards[link]
                self._changed.notify_all()
        finally:
            link.release()
        if self._guard.is_closed(link.epoch):
            link.shut()

    def _recall_readers(self) -> None:
        with self._changed:
            for ward in self._wards.values():
                ward.recall()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _keep(self, message: Message) -> None:
        step = message.step
        with self._changed:
            if message.kind is Kind.RECORD:
                self._generations[step] = _Generation(message.epoch, message.payload)
                for other in [other for other in self._generations if other not in (step, step - 1)]:
                    del self._generations[other]
                self._changed.notify_all()
            else:  # nobody waits for a tail: woken for one, the main thread would only wait again
                self._had_tails = True
                if step in self._generations:
                    self._generations[step].tail = message.payload

    def _decided(self, step: int, epoch: int) -> bool:
        """Nothing is left to wait for."""
        with self._changed:
            return self._closed_epoch >= epoch or self._has(step, epoch)

    def _has(self, step: int, epoch: int) -> bool:
        generation = self._generations.get(step)
        return generation is not None and generation.epoch >= epoch
