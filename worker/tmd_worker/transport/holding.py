"""What one process has of all groups, in one place, for those parts of the fabric that open, leave and end links."""

from __future__ import annotations

import dataclasses
import threading

from tmd_worker.transport.group import Group
from tmd_worker.transport.labels import Labels
from tmd_worker.transport.standing import Standing
from tmd_worker.transport.tables import Tables


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """`lock` guards `groups` and `standing`; the other two guard themselves."""

    tables: Tables
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    #: By label, those that this process has not left.
    groups: dict[str, Group] = dataclasses.field(default_factory=dict)
    standing: Standing = dataclasses.field(default_factory=Standing)
    labels: Labels = dataclasses.field(default_factory=Labels)
