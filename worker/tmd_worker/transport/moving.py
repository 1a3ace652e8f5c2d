"""The calls that bring values from members to members unchanged: broadcast, gather, scatter, all-gather, all-to-all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport import sandbox
from tmd_worker.transport.calling import CallingGroup, Options, each, listed, nested, one_each
from tmd_worker.transport.inner import Collectives
from tmd_worker.transport.tensors import flat, put_back, size_bytes


class MovingGroup(CallingGroup):
    """All raise ValueError for lists and sizes that cannot be right, before anything is sent."""

    def broadcast(self, tensors: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        tensors = listed(tensors)
        options = Options(*args, **named)
        root = options.root(self._group.size)
        unknown = root != self._group.rank and sandbox.uninitialised()
        return self._collective(
            "broadcast",
            tensors,
            tensors,
            lambda carrier: each(lambda tensor: carrier.broadcast(tensor, root), tensors),
            lambda: each(sandbox.none_pickled, tensors if unknown else []),
            waits=options.waits,
        )

    def barrier(self, *args: Any, **named: Any) -> Work:
        run, nothing = (lambda carrier: carrier.barrier()), (lambda: None)
        return self._collective("barrier", [], [], run, nothing, waits=Options(*args, **named).waits)

    # ---------------------------------------------------------------- all-gather

    def allgather(self, outputs: Any, inputs: Any, *args: Any) -> Work:
        """The members' tensors may differ in size, if all pass outputs of these sizes."""
        return self._allgather("allgather", nested(outputs), listed(inputs), Options(*args).waits)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Work:
        """`outputs[i]` has one tensor per member for `inputs[i]`."""
        return self._allgather("allgather_coalesced", outputs, inputs, Options(*args).waits)

    def _allgather(self, name: str, outputs: Any, inputs: Any, waits: bool) -> Work:
        pairs = list(zip(outputs, inputs, strict=True))
        for tensors, own in pairs:
            one_each(tensors, self._group.size, name)
            _same_bytes(name, own, tensors[self._group.rank])
        return self._collective(
            name,
            outputs,
            [tensor for tensors in outputs for tensor in tensors],
            lambda carrier: each(lambda pair: carrier.allgather(*pair), pairs),
            lambda: each(lambda pair: sandbox.gathered(*pair), pairs),
            read=inputs,
            waits=waits,
        )

    def all_gather_single(self, output: Tensor, own: Tensor, *args: Any) -> Work:
        return self._allgather_single("all_gather_single", [output], [own], output, Options(*args).waits)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any) -> Work:
        return self._allgather_single("all_gather_single_coalesced", outputs, inputs, outputs, Options(*args).waits)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _allgather_single(self, name: str, outputs: Any, inputs: Any, result: Any, waits: bool) -> Work:
        size = self._group.size
        pairs = list(zip(outputs, inputs, strict=True))
        for output, own in pairs:
            if output.numel() != size * own.numel() or output.dtype != own.dtype:
                raise ValueError(
                    f"{name} of {own.numel()} elements of {own.dtype} by {size} members needs an output of "
                    f"{size * own.numel()}, got {output.numel()} of {output.dtype}"
                )

        def run(carrier: Collectives) -> None:
            for output, own in pairs:
                whole = flat(output)
                carrier.allgather(list(whole.view(size, own.numel()).unbind(0)), own)
                put_back(whole, output)

        def local() -> None:
            each(lambda pair: sandbox.gathered([pair[0]], pair[1]), pairs)

        return self._collective(name, result, outputs, run, local, read=inputs, waits=waits)

    # ---------------------------------------------------------------- gather and scatter

    def gather(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        own = listed(inputs)[0]
        options = Options(*args, **named)
        root = options.root(self._group.size)
        targets = nested(outputs)[0] if root == self._group.rank else None
        if targets is not None:
            one_each(targets, self._group.size, "gather")
            each(lambda target: _same_bytes("gather", own, target), targets)

        return self._collective(
            "gather",
            outputs,
            targets or [],
            lambda carrier: carrier.gather(targets, own, root),
            lambda: sandbox.gathered(targets or [], own),
            read=[own],
            waits=options.waits,
        )

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> Work:  # type: ignore[override]
        output = listed(outputs)[0]
        rank, size = self._group.rank, self._group.size
        options = Options(*args, **named)
        root = options.root(size)
        parts = nested(inputs)[0] if root == rank else None
        unknown = root != rank and sandbox.uninitialised()
        if parts is not None:
            one_each(parts, size, "scatter")
            each(lambda part: _same_bytes("scatter", part, output), parts)

        def local() -> None:
            if parts:
                output.detach().copy_(parts[rank])
            elif unknown:
                sandbox.none_pickled(output)
            else:
                sandbox.received(output)

        def run(carrier: Collectives) -> None:
            carrier.scatter(output, parts, root)

        return self._collective("scatter", [output], [output], run, local, read=parts or (), waits=options.waits)

    # ---------------------------------------------------------------- all-to-all

    def alltoall(self, outputs: Any, inputs: Any, *args: Any) -> Work:
        """outputs[i] = what member i passed as inputs[own rank]. Sizes may differ, if sender and receiver agree."""
        outputs, inputs = list(outputs), list(inputs)
        rank, size = self._group.rank, self._group.size
        for tensors in (outputs, inputs):
            one_each(tensors, size, "alltoall")
        _same_bytes("alltoall", inputs[rank], outputs[rank])

        return self._collective(
            "alltoall",
            outputs,
            outputs,
            lambda carrier: carrier.alltoall(outputs, inputs),
            lambda: sandbox.exchanged(outputs, inputs, rank),
            read=inputs,
            waits=Options(*args).waits,
        )

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *args: Any
    ) -> Work:
        """Cut along the first dimension; without splits into equal parts."""
        rank, size = self._group.rank, self._group.size
        counts_out = _part_sizes(output, output_splits, size, "output")
        counts_in = _part_sizes(whole, input_splits, size, "input")
        if counts_out[rank] != counts_in[rank] or output.dtype != whole.dtype:
            raise ValueError(
                f"all_to_all_single: this rank has {counts_in[rank]} elements of {whole.dtype} for itself and room for "
                f"{counts_out[rank]} of {output.dtype}"
            )

        def run(carrier: Collectives) -> None:
            target = flat(output)
            carrier.alltoall(target.split_with_sizes(counts_out), flat(whole).split_with_sizes(counts_in))
            put_back(target, output)

        def local() -> None:
            target = flat(output)
            sandbox.exchanged(target.split_with_sizes(counts_out), flat(whole).split_with_sizes(counts_in), rank)
            put_back(target, output)

        return self._collective("all_to_all_single", output, [output], run, local, read=[whole], waits=Options(*args).waits)

    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _part_sizes(whole: Tensor, splits: Sequence[int], members: int, which: str) -> list[int]:
    """Elements of each member's part. Raises ValueError."""
    rows = whole.shape[0] if whole.dim() else 1
    if splits and (len(splits) != members or sum(splits) != rows or min(splits) < 0):
        raise ValueError(f"all_to_all_single: {which} splits {list(splits)} do not cut {rows} rows into {members} parts")
    if not splits and rows % members:
        raise ValueError(f"all_to_all_single: {rows} rows of the {which} cannot be cut into {members} equal parts")
    row = whole.numel() // rows if rows else 0
    return [count * row for count in splits or [rows // members] * members]


def _same_bytes(name: str, sent: Tensor, target: Tensor) -> None:
    if size_bytes(sent) != size_bytes(target) or sent.dtype != target.dtype:
        raise ValueError(
            f"{name}: a tensor of {sent.numel()} elements of {sent.dtype} does not fit one of {target.numel()} of {target.dtype}"
        )
