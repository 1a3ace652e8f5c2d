"""Makes the inner group of one process group for one epoch, beside whatever else runs.

Contract: `prepare` ends when the group has been made and has carried its first collective, or soon after the attempt was
cancelled, its deadline passed or a member died: only a thread that nobody waits for may be left in a library's blocking call.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tmd.protocol.control import TransportName
from tmd.protocol.membership import Membership
from tmd_worker.threads import Spawn
from tmd_worker.transport.dialing import LinkError
from tmd_worker.transport.gloo import GlooGroup
from tmd_worker.transport.group import Group
from tmd_worker.transport.inner import InnerBroken, InnerGroup
from tmd_worker.transport.labels import MEETING
from tmd_worker.transport.nccl import NcclGroup
from tmd_worker.transport.opening import Attempt, LinkRequest, Opener
from tmd_worker.transport.rendezvous import Rendezvous

#: How often a cancelled attempt is looked for.
_LOOK_S = 0.01
#: A library that connects to a member which has died must not try for longer, whoever waits for it or not.
_MAKING_S = 30.0


class Maker(Protocol):
    """Meets the other members in the store and makes the group; blocks for at most about `making_s`."""

    def __call__(self, store: Rendezvous, host: str, rank: int, size: int, timeout_s: float, making_s: float) -> InnerGroup: ...


_MAKERS: dict[TransportName, Maker] = {"gloo": GlooGroup.make, "nccl": NcclGroup.make}


class Preparer:
    """For one process. `host` is the address that its inner groups listen on."""

    def __init__(self, transport: TransportName, host: str, opener: Opener, spawn: Spawn) -> None:
        self._transport = transport
        self._host = host
        self._opener = opener
        self._spawn = spawn

    def prepare(self, group: Group, membership: Membership, rank: int, attempt: Attempt) -> InnerGroup | None:
        """All members must call it, in the same order for all groups. None if a member has left it: `attempt.gone` says who.

        Raises LinkError or Cancelled.
        """
        hub = min(group.ranks)
        peers = [peer for peer in group.ranks if peer != rank] if rank == hub else [hub]
        requests = [LinkRequest(group.name + MEETING, peer, membership.members[peer]) for peer in peers]
        met = self._opener.open(requests, rank, attempt)
        store = Rendezvous(
            {request.peer: connection.sock for request, connection in met.items()}, hub=rank == hub, spawn=self._spawn
        )
        if group.name in attempt.gone:
            if rank == hub:
                store.call_off(attempt.gone[group.name])
            store.close(done=False)
            return None
        making = _Making(_MAKERS[self._transport], store, self._host, group, attempt)
        self._spawn(f"make-{group.name}", making.run)
        try:
            return making.result()
        finally:
            store.close(done=making.inner is not None and not making.abandoned)


class _Making:
    """One group being made in a thread of its own."""

    def __init__(self, make: Maker, store: Rendezvous, host: str, group: Group, attempt: Attempt) -> None:
        self._make = make
        self._store = store
        self._host = host
        self._group = group
        self._attempt = attempt
        self._ended = threading.Event()
        self._lock = threading.Lock()
        #: Not the exception: its frames would keep what was half made.
        self._error = ""
        #: Made, and perhaps still on its first collective.
        self.inner: InnerGroup | None = None
        self.abandoned = False

    def run(self) -> None:
        """The thread's body."""
        try:
            inner = self._make(
                self._store,
                self._host,
                self._group.rank,
                self._group.size,
                self._group.timeout_s,
                min(max(self._attempt.deadline_s - time.monotonic(), 1.0), _MAKING_S),
            )
            with self._lock:
                self.inner = inner
                useless = self.abandoned
            if not useless:
                inner.barrier()
            else:
                inner.abort()
                inner.release()
        except (RuntimeError, OSError, InnerBroken) as error:
            self._error = (str(error) or type(error).__name__).splitlines()[0]
        self._ended.set()

    def result(self) -> InnerGroup | None:
        """None if a member has left the group, which the attempt is told. Raises LinkError or Cancelled."""
        try:
            return self._result()
        except LinkError:
            self._abandon()
            if self._store.gone is None:
                raise
            self._attempt.gone[self._group.name] = self._store.gone
            return None

    def _result(self) -> InnerGroup:
        while not self._ended.wait(_LOOK_S):
            self._attempt.check()
            if self._store.broken is not None:
                raise LinkError(self._said(self._store.broken))
            if time.monotonic() > self._attempt.deadline_s:
                raise LinkError(self._said("not all members came in time"))
        if self._error:
            raise LinkError(self._said(self._store.broken or self._error))
        assert self.inner is not None
        return self.inner

    def _said(self, why: str) -> str:
        return f"the inner group of {self._group.name} was not made: {why}"

    def _abandon(self) -> None:
        """The thread ends by itself; whatever it makes is given back."""
        self._store.give_up("a member gave up")
        with self._lock:
            self.abandoned = True
            inner = self.inner
        if inner is not None:
            inner.abort()
            inner.release()
