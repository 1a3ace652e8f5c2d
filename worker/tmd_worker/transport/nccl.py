"""Collectives by PyTorch's NCCL: one ProcessGroupNCCL per group and epoch, made without blocking, ended by abort.

NCCL's own means to change a communicator do not keep the rank of whoever is replaced (shrink renumbers, grow appends), so a
new one is made beside the old one. It takes a second communicator's buffers on the GPU until the old one is given back.

Contract beyond InnerGroup's: inputs are complete on the device when a call begins, and outputs are when it returns.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore

from tmd_worker.transport.inner import InnerBroken
from tmd_worker.transport.releasing import give_back
from tmd_worker.transport.rendezvous import Rendezvous
from tmd_worker.transport.tensors import Reduction

_OPERATORS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.AVG,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


class NcclGroup:
    """An InnerGroup on the process's current CUDA device."""

    def __init__(self, backend: Any, store: Rendezvous, rank: int, timeout_s: float) -> None:
        self._backend = backend
        self._store = store
        self._rank = rank
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @classmethod
    def make(cls, store: Rendezvous, host: str, rank: int, size: int, timeout_s: float, making_s: float) -> NcclGroup:
        """Meets the other members. NCCL itself connects them in the first collective. Raises RuntimeError or MeetingBroken."""
        if not torch.cuda.is_available() or not hasattr(dist, "ProcessGroupNCCL"):
            raise RuntimeError("NCCL needs a CUDA device and a PyTorch that was built with CUDA")
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = datetime.timedelta(seconds=making_s)
        backend = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        return cls(backend, store, rank, timeout_s)

    # ---------------------------------------------------------------- collectives

    def barrier(self) -> None:
        self.allreduce(torch.zeros(1, device=self._device), Reduction.SUM)

    def allreduce(self, tensor: Tensor, kind: Reduction) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _operator(kind)
        total = tensor.detach().contiguous()
        self._run("allreduce", options, [total])
        _put_back(total, tensor)

    def reduce(self, tensor: Tensor, kind: Reduction, root: int) -> None:
        options = dist.ReduceOptions()
        options.reduceOp = _operator(kind)
        options.rootRank = root
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._run("reduce", options, [total])
        if root == self._rank:
            tensor.detach().copy_(total)

    def reduce_scatter(self, output: Tensor, blocks: Sequence[Tensor], kind: Reduction) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _operator(kind)
        total = output.detach().contiguous()
        self._run("reduce_scatter", options, [total], [[block.detach().contiguous() for block in blocks]])
        _put_back(total, output)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        data = tensor.detach().contiguous()
        self._run("broadcast", options, [data])
        _put_back(data, tensor)

    def allgather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        blocks = [output.detach().contiguous() for output in outputs]
        self._run("allgather", AllgatherOptions(), [blocks], [own.detach().contiguous()])
        for block, output in zip(blocks, outputs, strict=True):
            _put_back(block, output)

    def gather(self, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        copies = [block.detach().contiguous() for block in blocks or ()]
        self._run("gather", options, [copies] if copies else [], [own.detach().contiguous()])
        for copy, block in zip(copies, blocks or (), strict=True):
            _put_back(copy, block)

    def scatter(self, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        target = output.detach().contiguous()
        parts = [block.detach().contiguous() for block in blocks or ()]
        self._run("scatter", options, [target], [parts] if parts else [])
        _put_back(target, output)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        targets = [output.detach().contiguous() for output in outputs]
        self._run("alltoall", dist.AllToAllOptions(), targets, [part.detach().contiguous() for part in inputs])
        for target, output in zip(targets, outputs, strict=True):
            _put_back(target, output)

    def _run(self, method: str, options: Any, *arguments: Any) -> None:
        """Raises InnerBroken."""
        backend = self._backend
        if backend is None:
            raise InnerBroken("NCCL: this group was given back")
        options.timeout = self._timeout
        try:
            with torch.cuda.stream(self._stream):
                getattr(backend, method)(*arguments, options).wait()
            self._stream.synchronize()
        except RuntimeError as error:
            raise InnerBroken(f"NCCL: {str(error).splitlines()[0]}") from None

    # ---------------------------------------------------------------- its end

    def abort(self) -> None:
        backend = self._backend
        if backend is not None:
            backend.abort()

    def release(self) -> None:
        """By abort: NCCL's orderly end is a collective, and the leaver does not take part in it."""
        self.abort()
        give_back(self._take)

    def _take(self) -> object:
        backend, self._backend = self._backend, None
        return backend


def _operator(kind: Reduction) -> Any:
    if kind not in _OPERATORS:
        raise NotImplementedError(f"ReduceOp.{kind.name} is not defined on NCCL")
    return _OPERATORS[kind]


def _put_back(copy: Tensor, tensor: Tensor) -> None:
    if copy.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(copy)
