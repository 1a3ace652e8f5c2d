"""The calls that combine values of all members: all-reduce, reduce, reduce-scatter, in every form that PyTorch has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport import sandbox, sparse
from tmd_worker.transport.calling import CallingGroup, Options, each, listed, nested, one_each
from tmd_worker.transport.inner import Collectives
from tmd_worker.transport.tensors import Reduction, reduction


class ReducingGroup(CallingGroup):
    """All raise NotImplementedError or TypeError for an operator that the type of the tensors does not have."""

    def allreduce(self, tensors: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        return self._allreduce("allreduce", tensors, Options(*args, **named))

    def allreduce_coalesced(self, tensors: Any, *args: Any, **named: Any) -> Work:
        return self._allreduce("allreduce_coalesced", tensors, Options(*args, **named))

    def _allreduce(self, name: str, tensors: Any, options: Options) -> Work:
        tensors = listed(tensors)
        kind = reduction(options.operator, tensors)
        size = self._group.size
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._sparse_allreduce(name, tensors, kind, options)
        return self._collective(
            name,
            tensors,
            tensors,
            lambda carrier: each(lambda tensor: carrier.allreduce(tensor, kind), tensors),
            lambda: each(lambda tensor: sandbox.reduced(tensor, kind, size), tensors),
            waits=options.waits,
        )

    def _sparse_allreduce(self, name: str, tensors: list[Tensor], kind: Reduction, options: Options) -> Work:
        sparse.check(tensors, kind, name)
        size = self._group.size
        return self._collective(
            f"{name} of a sparse tensor",
            tensors,
            [],  # neither recorded nor replaced by NaN: its size is known in the end alone
            lambda carrier: sparse.total(carrier, tensors[0], size),
            lambda: sparse.total_locally(tensors[0], size),
            waits=options.waits,
        )

    def reduce(self, tensors: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        """Only the root's tensor changes."""
        tensors = listed(tensors)
        size = self._group.size
        options = Options(*args, **named)
        root = options.root(size)
        kind = reduction(options.operator, tensors)
        is_root = root == self._group.rank

        def run(carrier: Collectives) -> None:
            each(lambda tensor: carrier.reduce(tensor, kind, root), tensors)

        def local() -> None:
            each(lambda tensor: sandbox.reduced(tensor, kind, size), tensors if is_root else [])

        return self._collective("reduce", tensors, tensors, run, local, waits=options.waits)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        """The parts may differ in size, if all members pass the same sizes."""
        outputs = listed(outputs)
        return self._reduce_scatter("reduce_scatter", outputs, nested(inputs), Options(*args, **named), outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        return self._reduce_scatter("reduce_scatter_single", [output], [self._parts(whole)], Options(*args, **named), output)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, wholes: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        parts = [self._parts(whole) for whole in wholes]
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, parts, Options(*args, **named), outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _parts(self, whole: Tensor) -> list[Tensor]:
        size = self._group.size
        if whole.numel() % size:
            raise ValueError(f"reduce_scatter of {whole.numel()} elements cannot be cut into {size} equal parts")
        return list(whole.detach().contiguous().view(size, whole.numel() // size).unbind(0))

    def _reduce_scatter(self, name: str, outputs: Any, inputs: Any, options: Options, result: Any) -> Work:
        kind = reduction(options.operator, outputs)
        rank, size = self._group.rank, self._group.size
        for output, parts in zip(outputs, inputs, strict=True):
            one_each(parts, size, name)
            if parts[rank].numel() != output.numel() or parts[rank].dtype != output.dtype:
                raise ValueError(
                    f"{name}: the part for this rank has {parts[rank].numel()} elements of {parts[rank].dtype}, "
                    f"its output {output.numel()} of {output.dtype}"
                )

        def run(carrier: Collectives) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                carrier.reduce_scatter(output, parts, kind)

        def local() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                sandbox.gathered([output], parts[rank])
                sandbox.reduced(output, kind, size)

        read = [part for parts in inputs for part in parts]
        return self._collective(name, result, outputs, run, local, read=read, waits=options.waits)
