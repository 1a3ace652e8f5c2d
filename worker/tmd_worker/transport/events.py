"""What the fabric tells the runtime, and what it asks it."""

from __future__ import annotations

from typing import Protocol

from tmd_worker.core.rank import Admission


class FabricEvents(Protocol):
    """Called from transport threads and from threads that run a collective, never while a lock of the transport is held."""

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        """A link of an active or opened epoch closed. `peer` is a global rank; `orderly`: it sent STOP first."""

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        """What becomes of a collective that is called now."""

    def thread_died(self, error: BaseException) -> None:
        """A transport thread cannot go on; the process must end."""
