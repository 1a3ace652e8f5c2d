"""Planted bugs: patches to the cores by name, to see that the simulator finds each."""

from __future__ import annotations

from typing import Any

from tmd.core.daemon import DaemonCore
from tmd.core.instructions import Instruction
from tmd_worker.core.rank import RankCore


class Cores:
    """Makes the cores of one seed, sound ones or with one planted bug."""

    votes_without_record = False

    def __init__(self, bug: str = "") -> None:
        self.bug = bug

    def rank(self, **arguments: Any) -> RankCore:
        return RankCore(**arguments)

    def daemon(self, settings: Any, **arguments: Any) -> DaemonCore:
        return DaemonCore(settings, **arguments)

    def order_of(self, out: list[Instruction]) -> list[Instruction]:
        return out
