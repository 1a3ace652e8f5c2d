"""The fabric of this process, and what a fork does to it.

A forked child (a data loader's worker) closes its copies of all descriptors: they would keep the peers from noticing that
this process died.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmd_worker.transport.fabric import Fabric

_fabrics: list[weakref.ref[Fabric]] = []


def current() -> Fabric:
    """The newest fabric of this process. Raises RuntimeError when there is none."""
    for reference in reversed(_fabrics):
        fabric = reference()
        if fabric is not None:
            return fabric
    raise RuntimeError("the tmd backend needs a Session (or a Fabric) in this process before a process group is made")


def adopt(fabric: Fabric) -> None:
    _fabrics.append(weakref.ref(fabric))


def forget(fabric: Fabric) -> None:
    _fabrics[:] = [reference for reference in _fabrics if reference() not in (None, fabric)]


def _close_copies() -> None:
    for reference in _fabrics:
        fabric = reference()
        if fabric is not None:
            fabric.close_copies()


os.register_at_fork(after_in_child=_close_copies)
