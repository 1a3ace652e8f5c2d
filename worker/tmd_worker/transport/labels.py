"""What members call a group among themselves, and which groups are over here.

Contract: all members make their common groups in the same order and so get the same label for each; no label is given twice in a
process. Nothing is kept for a group that is over if its name is one of PyTorch's running numbers.
"""

from __future__ import annotations

import threading

#: Between a group's label and the use of a link that is not one of the group's own.
USE = "#"
#: The uses: for send/recv, for all-to-all, and to meet for an inner group.
PAIR, DIRECT, MEETING = f"{USE}pair", f"{USE}direct", f"{USE}meeting"
#: Between a name and the number of times that it was in use before.
_AGAIN = "~"
#: Of a group that this process itself has destroyed.
OWN = -1


class Labels:
    """For one process. PyTorch numbers groups, from 0 again once all are destroyed; a group with `use_local_synchronization` is
    named after its members, as often as it is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[str] = set()
        #: Of the names that are numbers: how often they have begun anew, and the highest since.
        self._newest = (0, -1)
        #: Every other name: how often it was given before its last time.
        self._again: dict[str, int] = {}
        #: Those that another member's word has ended: the rank that destroyed them.
        self._ended_by: dict[str, int] = {}

    def make(self, name: str) -> str:
        """The label of a new group that PyTorch calls so."""
        with self._lock:
            if name.isdecimal():
                turn, highest = self._newest
                turn += int(name) <= highest
                self._newest = turn, int(name)
            else:
                turn = self._again[name] = self._again.get(name, -1) + 1
            label = f"{name}{_AGAIN}{turn}" if turn else name
            self._alive.add(label)
            return label

    def end(self, label: str, by: int) -> None:
        """`by`: the rank that destroyed it, or OWN."""
        with self._lock:
            self._alive.discard(label)
            if by != OWN:
                self._ended_by[label] = by

    def over(self, label: str) -> int | None:
        """The rank that destroyed it, or OWN; None for one that lives here or has not been made yet."""
        label = label.partition(USE)[0]
        name, _, again = label.partition(_AGAIN)
        turn = int(again or 0)
        with self._lock:
            if label in self._alive:
                return None
            was_made = (turn, int(name)) <= self._newest if name.isdecimal() else turn <= self._again.get(name, -1)
            return self._ended_by.get(label, OWN) if was_made else None
