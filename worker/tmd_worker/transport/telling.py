"""How a process that leaves a group tells the other members."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tmd.protocol.membership import Member
from tmd_worker.transport.dialing import LinkError
from tmd_worker.transport.ports import Ports

#: The kind of the connection on which a member says that it has left.
LEAVING = "leaving"
#: How long one member is tried, and how long all of them that could not be told at first.
TELL_S = 10.0
_TELL_AGAIN_S = 0.05
#: The answer: the other one has left the group as well, or not.
LEFT, STAYS = b"L", b"S"


class Farewell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sender has left `group`, because rank `by` has destroyed it."""

    group: str
    by: int
    #: The first collective that it has not called: its epoch, and how many came before it in that epoch.
    epoch: int
    calls: int


class Teller:
    """For one process."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports

    def tell_each(self, untold: Callable[[set[str]], list[tuple[Member, Farewell]]], told: Callable[[str, bytes], None]) -> None:
        """Blocks until nobody is left whom `untold` names, given the incarnations of those that were told, at most TELL_S.

        Those that could not be told are tried again. `told` takes the incarnation and its answer, LEFT or STAYS.
        """
        answered: set[str] = set()
        missed: set[str] = set()
        until_s = time.monotonic() + TELL_S
        pause_s = _TELL_AGAIN_S
        while (members := untold(answered)) and time.monotonic() < until_s:
            if any(member.incarnation in missed for member, _ in members):
                time.sleep(pause_s)
                pause_s *= 2
            for member, farewell in members:
                answer = self._tell(member, farewell)
                if answer is None:
                    missed.add(member.incarnation)
                    continue
                answered.add(member.incarnation)
                told(member.incarnation, answer)

    def _tell(self, member: Member, farewell: Farewell) -> bytes | None:
        """Its answer; None if it could not be told."""
        try:
            with self._ports.connect(member, LEAVING, msgspec.to_builtins(farewell), TELL_S) as sock:
                return sock.recv(1) or None
        except (LinkError, OSError):
            return None  # its links tell whether it lives
