"""Memory that is registered with an RDMA device, for one end of one handoff.

Contract: `hold` registers exactly the memory that it is given (pinned, touched: its cost grows with pages that were never used)
and lets go what an earlier call held beside that; what stays keeps its keys. Areas that touch are registered as one. The keys
belong to a protection domain of one handoff: no other connection can use them. A registration does not keep memory alive.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from tmd_worker.handoff import rdma_gpu
from tmd_worker.handoff.transfer import Memory, TransferFailed
from tmd_worker.handoff.verbs import Verbs, error_reason


class Registration(NamedTuple):
    """One area. `shift` added to an address of this process gives the one by which the device knows it."""

    lkey: int
    rkey: int
    shift: int


NOWHERE = Registration(0, 0, 0)


class Registrations:
    """See the module's contract. `access`: flags of verbs. Not for several threads at once."""

    def __init__(self, verbs: Verbs, domain: Any, access: int) -> None:
        self._verbs = verbs
        self._domain = domain
        self._access = access
        self._held: dict[Memory, tuple[Any, int]] = {}
        self._starts: list[int] = []
        self._areas: list[Memory] = []

    def hold(self, memory: Iterable[Memory]) -> None:
        """Raises TransferFailed."""
        areas = joined(memory)
        wanted = set(areas)
        for area in [area for area in self._held if area not in wanted]:
            self._let_go(area)
        self._areas = areas
        self._starts = [area.address for area in areas]
        for area in areas:
            if area not in self._held:
                self._held[area] = self._register(area)

    def of(self, memory: Memory) -> Registration:
        """The registration that it lies in; NOWHERE for no bytes. Raises KeyError if it is not held."""
        if not memory.size_bytes:
            return NOWHERE
        place = bisect.bisect_right(self._starts, memory.address) - 1
        if place >= 0:
            area = self._areas[place]
            if memory.address + memory.size_bytes <= area.address + area.size_bytes:
                region, shift = self._held[area]
                return Registration(region.lkey, region.rkey, shift)
        raise KeyError(memory)

    def close(self) -> None:
        for area in list(self._held):
            self._let_go(area)
        self._areas, self._starts = [], []

    def _let_go(self, area: Memory) -> None:
        with contextlib.suppress(self._verbs.error):  # the device is gone, and its registrations with it
            self._held.pop(area)[0].close()

    def _register(self, area: Memory) -> tuple[Any, int]:
        try:
            if rdma_gpu.is_on_gpu(area):
                return rdma_gpu.register(self._verbs, self._domain, area, self._access)
            return self._verbs.mr.MR(self._domain, area.size_bytes, self._access, address=area.address), 0
        except (self._verbs.error, OSError) as error:
            reason = error_reason(error) if isinstance(error, self._verbs.error) else str(error)
            raise TransferFailed(f"rdma: {area.size_bytes} bytes of memory cannot be registered: {reason}") from error


def joined(memory: Iterable[Memory]) -> list[Memory]:
    """What it covers, in order of addresses, with what touches or overlaps as one. No bytes are nowhere."""
    areas: list[Memory] = []
    for address, size in sorted(part for part in memory if part.size_bytes):
        if areas and address <= areas[-1].address + areas[-1].size_bytes:
            last = areas[-1]
            areas[-1] = Memory(last.address, max(last.size_bytes, address + size - last.address))
        else:
            areas.append(Memory(address, size))
    return areas
