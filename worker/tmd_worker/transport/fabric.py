"""All links of one process: its listener, its groups, and which epoch's links are live.

Contract: every method may be called from any thread. `FabricEvents` are called from transport threads and from threads
that run a collective, never while a lock of this package is held, so their implementation may call back into the fabric.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tmd.protocol.membership import Member, Membership, Plan
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import Admission
from tmd_worker.transport.buddy import BuddyChannel
from tmd_worker.transport.recording import BuildRecording


class FabricEvents(Protocol):
    """What the fabric tells the runtime, from transport threads."""

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        """A link of an active or opened epoch closed. `peer` is a global rank; `orderly`: it sent STOP first."""

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        """What becomes of a collective that is called now."""

    def thread_died(self, error: BaseException) -> None:
        """A transport thread cannot go on; the process must end."""


class LinkError(ConnectionError):
    """Links could not be opened; the text names the peer and why."""


class Cancelled(LinkError):
    """The epoch whose links were being opened was closed meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkInfo:
    """One live link as the operating system sees it."""

    fd: int
    local: tuple[str, int]
    remote: tuple[str, int]


class Fabric:
    """See the module's contract."""

    host: str
    port: int
    buddy: BuddyChannel

    def __init__(
        self,
        *,
        host: str,
        job_key: bytes,
        incarnation: str,
        events: FabricEvents,
        port_range: tuple[int, int] | None = None,
    ) -> None:
        """Listens at once and becomes the process's fabric (`current()`)."""

    def set_role(self, rank: int, world_size: int, nproc_per_node: int) -> None:
        """In place, for a standby too: every group maps its own rank again. Clears what the buddy channel kept."""

    def expect(self, membership: Membership) -> None:
        """Handshakes of this table are accepted from now on (current, being installed, or a plan's successor)."""

    def open(self, membership: Membership, rank: int, deadline_s: float) -> int:
        """Opens all links of all groups for this epoch and keeps them until activate(); blocks. Returns how many.

        Raises LinkError, or Cancelled when close() covered the epoch meanwhile.
        """

    def activate(self, epoch: int) -> None:
        """What was opened or staged for this epoch becomes live in every group."""

    def stage(self, plan: Plan, rank: int, deadline_s: float) -> int:
        """A stayer: only the links to joiners that it neighbours; a joiner: all of its links, for activate(). Returns how many.

        Raises LinkError, or Cancelled when drop_staged() or close() came first.
        """

    def drop_staged(self, plan_id: int) -> None:
        """Closes what was staged for this plan, also what is being staged."""

    def switch(self, plan: Plan, epoch: int) -> None:
        """The flip on a stayer, at a quiet boundary: staged links replace the leavers', kept ones go on in `epoch`."""

    def retire(self, epoch: int) -> None:
        """Closes the leavers' links that the switch to `epoch` left unused."""

    def close(self, epoch: int, reason: str) -> None:
        """Poison: STOP (best effort), then closes every link of an epoch up to this one; wakes all who wait on one; every
        work completes. Returns at once when that is done already."""

    def serve(self, kind: str, handler: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        """Other authenticated connections of this kind on the same listener, a thread each. The handler owns the socket.

        It gets the fields that the peer sent, with its incarnation under "incarnation". OSError that leaves it is
        dropped (the peer went away); any other exception ends the process.
        """

    def connect(self, member: Member, kind: str, fields: dict[str, Any], deadline_s: float) -> socket.socket:
        """An authenticated connection to another process's handler of this kind. Raises LinkError.

        The socket comes with a timeout of `deadline_s` per operation; change it with settimeout().
        """

    def links(self) -> dict[str, dict[int, LinkInfo]]:
        """Group name -> peer's global rank -> live link."""

    def vote(self, ballot: Ballot, deadline_s: float) -> tuple[Ballot | None, bool]:
        """The commit vote: a tree all-reduce over all ranks, in the caller's thread.

        Returns (result, or None if it broke; whether a frame of this rank's ballot may have left). When it broke,
        link_broken has been reported or the epoch was closed.
        """

    @property
    def sandbox(self) -> bool:
        """While True every collective is local, with valid values."""

    @sandbox.setter
    def sandbox(self, value: bool) -> None: ...

    @contextmanager
    def log_only(self) -> Iterator[None]:
        """Collectives of this block may follow the vote; when poisoned their floats are NaN."""
        yield

    def start_recording(self) -> None:
        """From now on the results of small live collectives are kept (the build phase)."""

    def stop_recording(self) -> BuildRecording:
        """Ends the recording and returns it (empty if it was never started)."""

    def rehearse(self, recording: BuildRecording) -> None:
        """Sandboxed collectives answer from this recording where it has an answer."""

    def close_all(self) -> None:
        """Closes everything, the listener too, and ends the threads. For the end of a process and for tests."""


def current() -> Fabric:
    """The process's fabric. Raises RuntimeError when there is none."""
    raise RuntimeError("no fabric")
