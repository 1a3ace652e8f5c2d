"""What PyTorch sees: the backend `tmd`, whose process groups keep name, rank and size while links come and go.

Methods are the ones that torch.distributed, DDP and the functional collectives call in PyTorch 2.13 and 2.14. All tensors are
dense CPU tensors, but for the all-reduce of a sparse one; what is not here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from tmd_worker.transport import process
from tmd_worker.transport.messaging import MessagingGroup
from tmd_worker.transport.moving import MovingGroup
from tmd_worker.transport.reducing import ReducingGroup

BACKEND = "tmd"
#: What makes groups out of groups without the rendezvous store; PyTorch has it for NCCL alone.
_REFUSED = ("merge_remote_group", "split_group")


def register() -> None:
    """Makes `backend="tmd"` known to torch.distributed (CPU). Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any = None) -> TmdProcessGroup:
    """torch.distributed calls it for every group that this process is a member of."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return TmdProcessGroup(process.current(), options.group_rank, ranks, options.timeout.total_seconds())


class TmdProcessGroup(ReducingGroup, MovingGroup, MessagingGroup):
    """The stable shell. It answers with this process's present role, which a standby takes in place."""

    #: PyTorch's name for it.
    _called = ""

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def getRank(self) -> int:
        return self._group.rank

    def getSize(self) -> int:
        return self._group.size

    def _set_group_name(self, name: str) -> None:
        """torch.distributed names a group right after making it: only now do all members mean the same one."""
        super()._set_group_name(name)  # type: ignore[arg-type]
        self._called = name
        self._fabric.add_group(self._group, name)

    def _get_backend(self, device: Any) -> TmdProcessGroup:  # type: ignore[override]
        """The group is its own backend, for the CPU. PyTorch 2.14 asks it what it supports, `batch_isend_irecv` for example, and
        takes what it has no attribute for as not supported. Raises RuntimeError for another device, as c10d does."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._called

    def shutdown(self) -> None:
        """No call follows. Returns at once: what is under way goes on to its end, and links close once both ends have left."""
        self._fabric.leave(self._group)

    def abort(self) -> None:
        """As shutdown: tmd itself decides when links close."""
        self.shutdown()

    def set_timeout(self, timeout: Any) -> None:
        self._group.timeout_s = timeout.total_seconds()


def _refuse(name: str) -> Callable[..., Work]:
    def refused(*_: Any, **__: Any) -> Work:
        raise NotImplementedError(f"{name} is not supported on the tmd backend; make groups with torch.distributed.new_group")

    return refused


for _name in _REFUSED:
    setattr(TmdProcessGroup, _name, _refuse(_name))
