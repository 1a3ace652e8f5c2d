"""What the calls of a process group have in common: who it is, and the way from a method of PyTorch to links.

A process group is made of this and one class for each family of calls (`reducing`, `moving`, `messaging`), see `shell`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport.calls import Call, Counted
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.delta import DeltaCollectives
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.group import Group
from tmd_worker.transport.inner import Collectives
from tmd_worker.transport.tensors import check
from tmd_worker.transport.work import Batch, Operation, TmdWork

_Item = TypeVar("_Item")


class CallingGroup(dist.ProcessGroup):
    """`ranks` are the members' global ranks; `rank` is this process's place among them, which a standby takes in place."""

    def __init__(self, owner: Fabric, rank: int, ranks: tuple[int, ...], timeout_s: float) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._fabric = owner
        self._group = Group("", ranks, timeout_s, carried=owner.transport != "delta", shares=True)
        self._group.rank = rank
        #: The works since _start_coalescing.
        self._batch: list[TmdWork] | None = None

    def _collective(
        self,
        name: str,
        result: Any,
        outputs: Sequence[Tensor],
        run: Callable[[Collectives], None],
        local: Callable[[], None],
        read: Sequence[Tensor] = (),
        *,
        waits: bool = False,
    ) -> Work:
        """`run` does it, `local` writes valid values without any peer. `read` are inputs. `waits`: see `Group.submit`."""
        check([*outputs, *read], name, outputs)
        owner, group = self._fabric, self._group
        waits = waits and self._batch is None  # of a batch all are under way before any is waited for

        def dispatch(operation: Operation, table: LinkTable) -> None:
            group.submit(owner, operation, table, lambda table: run(self._carrier(table)), waits=waits)

        return self._begin(Call(name, group, result, outputs, dispatch, local))

    def _carrier(self, table: LinkTable) -> Collectives:
        """What carries this group's collectives while this table is live."""
        if table.inner is not None:
            return table.inner
        return DeltaCollectives(table, lambda members: self._fabric.pairs.of(self._group, table.epoch).direct(table, members))

    def _pairwise(
        self,
        name: str,
        outputs: list[Tensor],
        dispatch: Callable[[Operation, LinkTable], None],
        local: Callable[[], None],
        source: int = -1,
    ) -> TmdWork:
        counted = Counted.RECEIVE if outputs else Counted.NOT
        return self._begin(Call(name, self._group, outputs, outputs, dispatch, local, counted, source))

    def _begin(self, call: Call) -> TmdWork:
        work = self._fabric.calls.begin(call)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, _device: Any) -> None:
        """Nothing is held back: all calls until `_end_coalescing` are under way at once and become one work."""
        self._batch = []

    def _end_coalescing(self, _device: Any) -> Work:
        works, self._batch = self._batch or [], None
        return Batch(works)


def each(action: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    for item in items:
        action(item)


def listed(tensors: Any) -> list[Tensor]:
    """c10d passes lists of one tensor, or (its older overloads) the tensor itself."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(lists: Any) -> list[list[Tensor]]:
    """c10d passes a list of lists, or (its older overloads) one list."""
    return [list(lists)] if lists and isinstance(lists[0], Tensor) else [list(tensors) for tensors in lists]


class Options:
    """Whatever follows the tensors in a call: c10d's options, or (in its older overloads) one field of theirs, or nothing."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._given = (*args, *named.values())

    @property
    def operator(self) -> object:
        """The reduction; a sum if nothing is said."""
        for given in self._given:
            if hasattr(given, "reduceOp"):
                return given.reduceOp
            if isinstance(given, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                return given
        return dist.ReduceOp.SUM

    def root(self, members: int) -> int:
        """A group rank; 0 if nothing is said. Raises ValueError."""
        root = 0
        for given in self._given:
            if hasattr(given, "rootRank"):
                root = given.rootRank
            elif isinstance(given, int):
                root = given
        if not 0 <= root < members:
            raise ValueError(f"root {root} is no rank of a group of {members}")
        return root

    @property
    def waits(self) -> bool:
        """The caller is going to wait at once (`async_op=False`)."""
        return any(getattr(given, "asyncOp", True) is False for given in self._given)


def one_each(tensors: Sequence[Tensor], members: int, what: str) -> None:
    """Raises ValueError unless there is one tensor for each member."""
    if len(tensors) != members:
        raise ValueError(f"{what} needs one tensor for each of the {members} members of the group, got {len(tensors)}")
