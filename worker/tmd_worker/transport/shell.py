"""What PyTorch sees: the backend `tmd`, whose process groups keep name, rank and size while links come and go.

Methods are the ones that torch.distributed, DDP and the functional collectives call in PyTorch 2.13; what is not here is
refused by name. All tensors are dense CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport import collectives, process, sandbox
from tmd_worker.transport.calls import Call
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.group import Group
from tmd_worker.transport.tensors import check, reduction
from tmd_worker.transport.work import Operation

_Item = TypeVar("_Item")

BACKEND = "tmd"
#: Operations of c10d that this backend does not have.
_REFUSED = (
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "monitored_barrier",
    "recv_anysource",
    "split_group",
)


def register() -> None:
    """Makes `backend="tmd"` known to torch.distributed (CPU). Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any = None) -> TmdProcessGroup:
    """torch.distributed calls it for every group that this process is a member of."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return TmdProcessGroup(process.current(), options.group_rank, ranks, options.timeout.total_seconds())


class TmdProcessGroup(dist.ProcessGroup):
    """The stable shell. It answers with this process's present role, which a standby takes in place."""

    def __init__(self, owner: Fabric, rank: int, ranks: tuple[int, ...], timeout_s: float) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._fabric = owner
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._group = Group("", ranks, timeout_s)
        self._group.rank = rank

    # ---------------------------------------------------------------- identity

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
        self._group.name = name
        self._fabric.add_group(self._group)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._group.name

    def shutdown(self) -> None:
        """Keeps the links: another member may be in a collective still. They close with the process."""

    def abort(self) -> None:
        """As shutdown: tmd itself decides when links close."""

    def set_timeout(self, timeout: Any) -> None:
        self._group.timeout_s = timeout.total_seconds()

    # ---------------------------------------------------------------- collectives

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        return self._allreduce("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._allreduce("allreduce_coalesced", tensors, opts)

    def _allreduce(self, name: str, tensors: Any, opts: Any) -> Work:
        tensors = _listed(tensors)
        kind = reduction(_operator(opts), tensors)
        size = self._group.size
        return self._collective(
            name,
            tensors,
            tensors,
            lambda table: _each(lambda tensor: collectives.allreduce(table, tensor, kind), tensors),
            lambda: _each(lambda tensor: sandbox.reduced(tensor, kind, size), tensors),
        )

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """An all-reduce on a copy; only the root's tensor changes."""
        tensors = _listed(tensors)
        kind = reduction(_operator(opts), tensors)
        is_root = opts.rootRank == self._group.rank
        size = self._group.size

        def run(table: LinkTable) -> None:
            for tensor in tensors:
                total = tensor.detach().clone()
                collectives.allreduce(table, total, kind)
                if is_root:
                    tensor.detach().copy_(total)

        def local() -> None:
            _each(lambda tensor: sandbox.reduced(tensor, kind, size), tensors if is_root else [])

        return self._collective("reduce", tensors, tensors, run, local)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors = _listed(tensors)
        root = opts.rootRank
        unknown = root != self._group.rank and sandbox.uninitialised()
        return self._collective(
            "broadcast",
            tensors,
            tensors,
            lambda table: _each(lambda tensor: collectives.broadcast(table, tensor, root), tensors),
            lambda: _each(sandbox.none_pickled, tensors if unknown else []),
        )

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Work:
        return self._allgather("allgather", outputs, _listed(inputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Work:
        """`outputs[i]` has one tensor per member for `inputs[i]`."""
        return self._allgather("allgather_coalesced", outputs, inputs)

    def _allgather(self, name: str, outputs: Any, inputs: Any) -> Work:
        pairs = list(zip(outputs, inputs, strict=True))
        return self._collective(
            name,
            outputs,
            [tensor for tensors in outputs for tensor in tensors],
            lambda table: _each(lambda pair: collectives.allgather(table, *pair), pairs),
            lambda: _each(lambda pair: sandbox.gathered(*pair), pairs),
            read=inputs,
        )

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any) -> Work:
        return self._allgather_single("all_gather_single", [output], [own], output)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Work:
        return self._allgather_single("all_gather_single_coalesced", outputs, inputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _allgather_single(self, name: str, outputs: Any, inputs: Any, result: Any) -> Work:
        size = self._group.size

        def run(table: LinkTable) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                with _Blocks(output, size) as blocks:
                    collectives.allgather(table, blocks, own)

        def local() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                sandbox.gathered([output], own)

        return self._collective(name, result, outputs, run, local, read=inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        outputs = _listed(outputs)
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts, outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter("reduce_scatter_single", [output], [self._parts(whole)], opts, output)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, wholes: Any, opts: Any = None) -> Work:
        parts = [self._parts(whole) for whole in wholes]
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, parts, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _parts(self, whole: Tensor) -> list[Tensor]:
        return list(whole.detach().contiguous().view(self._group.size, -1).unbind(0))

    def _reduce_scatter(self, name: str, outputs: Any, inputs: Any, opts: Any, result: Any) -> Work:
        kind = reduction(_operator(opts), outputs)
        rank, size = self._group.rank, self._group.size

        def run(table: LinkTable) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                copies = [part.detach().clone(memory_format=torch.contiguous_format).view(-1) for part in parts]
                collectives.reduce_scatter(table, output, copies, kind)

        def local() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                sandbox.gathered([output], parts[rank])
                sandbox.reduced(output, kind, size)

        return self._collective(name, result, outputs, run, local, read=[part for parts in inputs for part in parts])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """An all-gather; only the root keeps the result."""
        inputs = _listed(inputs)
        targets = outputs[0] if opts.rootRank == self._group.rank else None

        def run(table: LinkTable) -> None:
            collectives.allgather(table, targets or [torch.empty_like(inputs[0]) for _ in range(table.size)], inputs[0])

        return self._collective(
            "gather", outputs, targets or [], run, lambda: sandbox.gathered(targets or [], inputs[0]), read=inputs
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """The root broadcasts all parts; everybody keeps its own."""
        output = _listed(outputs)[0]
        root, rank, size = opts.rootRank, self._group.rank, self._group.size
        parts = inputs[0] if root == rank else None
        unknown = root != rank and sandbox.uninitialised()

        def run(table: LinkTable) -> None:
            shape = (size, *output.shape)
            whole = torch.stack([part.detach() for part in parts]) if parts else torch.empty(shape, dtype=output.dtype)
            collectives.broadcast(table, whole, root)
            output.detach().copy_(whole[rank])

        def local() -> None:
            if parts:
                output.detach().copy_(parts[rank])
            elif unknown:
                sandbox.none_pickled(output)
            else:
                sandbox.received(output)

        return self._collective("scatter", [output], [output], run, local, read=parts or ())

    def barrier(self, *_: Any, **__: Any) -> Work:
        return self._collective("barrier", [], [], collectives.barrier, lambda: None)

    # ---------------------------------------------------------------- send and receive

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        tensor = _listed(tensors)[0]
        check([tensor], "send")
        return self._pairwise("send", [], destination, lambda channel, operation: channel.send(operation, tensor, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        tensor = _listed(tensors)[0]
        check([tensor], "recv")
        return self._pairwise("recv", [tensor], source, lambda channel, operation: channel.receive(operation, tensor, tag))

    def _pairwise(self, name: str, outputs: list[Tensor], place: int, start: Callable[[Any, Operation], None]) -> Work:
        if place == self._group.rank:
            raise ValueError(f"{name} to or from this rank itself (rank {place} of group {self.group_name})")
        pairs = self._fabric.pairs

        def dispatch(operation: Operation, table: LinkTable) -> None:
            start(pairs.channel(self._group, table.epoch, place), operation)

        call = Call(name, self._group, outputs, outputs, dispatch, lambda: _each(sandbox.received, outputs), collective=False)
        return self._fabric.calls.begin(call)

    # ---------------------------------------------------------------- what all have in common

    def _collective(
        self,
        name: str,
        result: Any,
        outputs: Sequence[Tensor],
        run: Callable[[LinkTable], None],
        local: Callable[[], None],
        read: Sequence[Tensor] = (),
    ) -> Work:
        check([*outputs, *read], name)
        owner, group = self._fabric, self._group

        def dispatch(operation: Operation, table: LinkTable) -> None:
            group.submit(owner, operation, table, run)

        return owner.calls.begin(Call(name, group, result, outputs, dispatch, local))


def _refuse(name: str) -> Callable[..., Work]:
    def refused(*_: Any, **__: Any) -> Work:
        raise NotImplementedError(f"{name} is not supported on the tmd backend yet")

    return refused


for _name in _REFUSED:
    setattr(TmdProcessGroup, _name, _refuse(_name))


class _Blocks:
    """One block per member of a tensor that all are gathered into; written back if the tensor is not contiguous."""

    def __init__(self, whole: Tensor, size: int) -> None:
        self._whole = whole.detach()
        self._copy = self._whole.contiguous()
        self._size = size

    def __enter__(self) -> list[Tensor]:
        return list(self._copy.view(self._size, -1).unbind(0))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and self._copy.data_ptr() != self._whole.data_ptr():
            self._whole.copy_(self._copy)


def _each(action: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    for item in items:
        action(item)


def _listed(tensors: Any) -> list[Tensor]:
    """c10d passes lists of one tensor, or (its older overloads) the tensor itself."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _operator(opts: Any) -> object:
    return getattr(opts, "reduceOp", opts if opts is not None else dist.ReduceOp.SUM)
