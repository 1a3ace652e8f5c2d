"""Which memberships this process knows, and what it answers to a link that is asked for under one of them."""

from __future__ import annotations

import threading

from tmd.protocol.membership import Membership
from tmd_worker.transport.handshake import Hello, Verdict


class Tables:
    """Epoch -> membership, for the live epoch and those above it."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._known: dict[int, Membership] = {}
        #: Every epoch below this one is over; this one runs (or nothing does, -1).
        self.live_epoch = -1
        #: Every epoch up to this one was closed.
        self.closed_epoch = -1

    def expect(self, membership: Membership) -> None:
        """From now on this is the table of its epoch; a second plan for the same epoch replaces the first."""
        with self._lock:
            if membership.epoch > self.closed_epoch:
                self._known[membership.epoch] = membership

    def of(self, epoch: int) -> Membership | None:
        return self._known.get(epoch)

    def knows(self, incarnation: str) -> bool:
        """A member by any of these tables."""
        with self._lock:
            return any(member.incarnation == incarnation for table in self._known.values() for member in table.members.values())

    def activate(self, epoch: int) -> None:
        with self._lock:
            self.live_epoch = max(self.live_epoch, epoch)
            self._forget_below(self.live_epoch)

    def close(self, epoch: int) -> bool:
        """False if that was closed before."""
        with self._lock:
            if epoch <= self.closed_epoch:
                return False
            self.closed_epoch = epoch
            self._forget_below(epoch + 1)
            return True

    def judge(self, hello: Hello) -> Verdict:
        """A stale epoch or the wrong incarnation in the live one is final; what lies ahead may still change: retry."""
        with self._lock:
            over = max(self.closed_epoch, self.live_epoch - 1)
            if hello.epoch <= over:
                return Verdict(answer="refused", reason=f"epoch {hello.epoch} is over here (every epoch up to {over} is)")
            table = self._known.get(hello.epoch)
            if table is None:
                return Verdict(answer="retry", reason=f"epoch {hello.epoch} is not known here yet")
            dialer, listener = table.members.get(hello.rank), table.members.get(hello.peer_rank)
            if dialer is not None and listener is not None:
                expected = (dialer.incarnation, listener.incarnation)
                if expected == (hello.incarnation, self._incarnation):
                    return Verdict(answer="ok")
            return Verdict(
                answer="refused" if hello.epoch == self.live_epoch else "retry",
                reason=f"in epoch {hello.epoch} rank {hello.rank} is not {hello.incarnation}, or {hello.peer_rank} not this one",
            )

    def _forget_below(self, epoch: int) -> None:
        for known in [known for known in self._known if known < epoch]:
            del self._known[known]
