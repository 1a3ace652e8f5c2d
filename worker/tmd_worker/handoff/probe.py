"""Which transports this process can use, and why not the others.

Contract: each transport is asked anew whenever it matters, so that a link that came up or went down counts; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Sequence

from tmd.protocol.handoff import TransferMode
from tmd_worker.handoff.transfer import Transport


class Transports:
    """What this process has, best first. The last one is `spare`: it always works, and finishes what another began."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.all = tuple(transports)
        self.spare = self.all[-1]

    def wanted(self, mode: TransferMode) -> tuple[Transport, ...]:
        """Those that may be agreed on."""
        return tuple(transport for transport in self.all if mode in ("auto", transport.name))

    def obstacle(self, mode: TransferMode) -> str:
        """Why no handoff can be begun here under this mode; empty: one can."""
        reasons = {transport.name: transport.probe() for transport in self.wanted(mode)}
        if not reasons:
            return f"{mode} is not a transport that this version has"
        return "" if not all(reasons.values()) else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
