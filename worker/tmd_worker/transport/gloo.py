"""Collectives by PyTorch's gloo: one ProcessGroupGloo per group and epoch, with a device (a listening port, a thread) of its own.

gloo has no way to end a call that waits for a member: `abort` shuts down the group's sockets, which are known by the ports of the
members' devices, and gloo then fails every call on both ends.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore

from tmd_worker.transport.inner import InnerBroken
from tmd_worker.transport.releasing import give_back, never_give_back
from tmd_worker.transport.rendezvous import Rendezvous
from tmd_worker.transport.tensors import Reduction, byte_view, combine, finish, flat, put_back

#: Everything else is moved as bytes and combined by tmd, in the order of the ranks.
_ADDED_BY_GLOO = {torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
_OPERATORS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
#: A call that was aborted ends within this time, also where gloo does not notice.
_LOOK = datetime.timedelta(seconds=1)
#: Two devices at once could not be told apart by what descriptors are new.
_making_device = threading.Lock()

_Address = tuple[str, int]


class GlooGroup:
    """An InnerGroup. Calls take as long as the group's timeout at most."""

    def __init__(self, backend: Any, store: Rendezvous, addresses: Sequence[_Address], rank: int, timeout_s: float) -> None:
        self._backend = backend
        self._store = store
        self._addresses = frozenset(addresses)
        self._rank = rank
        self._size = len(addresses)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._aborted = False

    @classmethod
    def make(cls, store: Rendezvous, host: str, rank: int, size: int, timeout_s: float, making_s: float) -> GlooGroup:
        """Meets the other members; blocks for at most about `making_s`. Raises RuntimeError, MeetingBroken or OSError."""
        device, address = _device(host)
        store.set(f"device/{rank}", msgspec.msgpack.encode(address))
        addresses = [msgspec.msgpack.decode(store.get(f"device/{place}"), type=_Address) for place in range(size)]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=making_s)
        backend = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        return cls(backend, store, addresses, rank, timeout_s)

    # ---------------------------------------------------------------- collectives

    def barrier(self) -> None:
        self._run("barrier", dist.BarrierOptions())

    def allreduce(self, tensor: Tensor, kind: Reduction) -> None:
        total = flat(tensor)
        self._reduce_everywhere(total, kind)
        put_back(total, tensor)

    def reduce(self, tensor: Tensor, kind: Reduction, root: int) -> None:
        """As an all-reduce whose result only the root keeps: so the bits are those of an all-reduce."""
        total = flat(tensor).clone()
        self._reduce_everywhere(total, kind)
        if root == self._rank:
            tensor.detach().copy_(total.view(tensor.shape))

    def reduce_scatter(self, output: Tensor, blocks: Sequence[Tensor], kind: Reduction) -> None:
        """As an all-reduce of which every member keeps its part; gloo's own does the same."""
        total = torch.cat([flat(block) for block in blocks])
        self._reduce_everywhere(total, kind)
        sizes = [block.numel() for block in blocks]
        output.detach().copy_(total.split_with_sizes(sizes)[self._rank].view(output.shape))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        data = flat(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        if data.numel():
            self._run("broadcast", options, [_bytes(data)])
        if root != self._rank:
            put_back(data, tensor)

    def allgather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        blocks = [flat(output) for output in outputs]
        mine = flat(own)
        if len({block.numel() for block in blocks}) > 1:
            self._allgather_of_several_sizes(blocks, mine)
        elif mine.numel():
            self._run("allgather", AllgatherOptions(), [[_bytes(block) for block in blocks]], [_bytes(mine)])
        for block, output in zip(blocks, outputs, strict=True):
            put_back(block, output)

    def gather(self, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        copies = [flat(block) for block in blocks or ()]
        mine = flat(own)
        if mine.numel():
            self._run("gather", options, [[_bytes(copy) for copy in copies]] if copies else [], [_bytes(mine)])
        for copy, block in zip(copies, blocks or (), strict=True):
            put_back(copy, block)

    def scatter(self, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        target = flat(output)
        parts = [_bytes(flat(block)) for block in blocks or ()]
        if target.numel():
            self._run("scatter", options, [_bytes(target)], [parts] if parts else [])
        put_back(target, output)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        sent = torch.cat([_bytes(flat(part)) for part in inputs])
        targets = [flat(output) for output in outputs]
        views = [_bytes(target) for target in targets]
        received = torch.empty(sum(view.numel() for view in views), dtype=torch.uint8, device="cpu")
        counts = [view.numel() for view in views], [_bytes(flat(part)).numel() for part in inputs]
        self._run("alltoall_base", dist.AllToAllOptions(), received, sent, *counts)
        for view, part in zip(views, received.split_with_sizes(counts[0]), strict=True):
            view.copy_(part)
        for target, output in zip(targets, outputs, strict=True):
            put_back(target, output)

    def _reduce_everywhere(self, total: Tensor, kind: Reduction) -> None:
        if not total.numel():
            return
        if total.dtype in _ADDED_BY_GLOO and kind in _OPERATORS:
            options = dist.AllreduceOptions()
            options.reduceOp = _OPERATORS[kind]  # type: ignore[assignment]
            self._run("allreduce", options, [total])
        else:
            parts = [torch.empty_like(total) for _ in range(self._size)]
            self.allgather(parts, total)
            total.copy_(parts[0])
            for part in parts[1:]:
                combine(kind, total, part)
        finish(kind, total, self._size)

    def _allgather_of_several_sizes(self, blocks: Sequence[Tensor], mine: Tensor) -> None:
        blocks[self._rank].copy_(mine)
        for place, block in enumerate(blocks):
            self.broadcast(block, place)

    def _run(self, method: str, options: Any, *arguments: Any) -> None:
        """Raises InnerBroken."""
        backend = self._backend
        if backend is None:
            raise InnerBroken("gloo: this group was given back")
        options.timeout = self._timeout
        try:
            self._await(backend, getattr(backend, method)(*arguments, options))
        except RuntimeError as error:
            raise InnerBroken(f"gloo: {str(error).splitlines()[0]}") from None

    def _await(self, backend: Any, work: Any) -> None:
        """Raises RuntimeError. In a call that began while the group was aborted gloo has been seen to wait on, though all its
        connections were closed."""
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # its own error; or it has come to its end this very moment
                elif self._aborted:
                    never_give_back(backend)
                    raise RuntimeError("the group was aborted in the middle of a call") from None
                else:
                    continue
            return

    # ---------------------------------------------------------------- its end

    def abort(self) -> None:
        self._aborted = True
        for sock in _sockets():
            with sock:
                if self._owns(sock):
                    _shut(sock)

    def release(self) -> None:
        give_back(self._take)

    def _take(self) -> object:
        backend, self._backend = self._backend, None
        return backend

    def _owns(self, sock: socket.socket) -> bool:
        """Connected, and one end is the port of a member's device."""
        try:
            return bool({sock.getsockname()[:2], sock.getpeername()[:2]} & self._addresses)
        except (OSError, TypeError):
            return False  # not connected, or no internet socket


def _device(host: str) -> tuple[Any, _Address]:
    """A new device, and where it listens: the one listening socket on this address that was not there before."""
    with _making_device:
        before = set(_listening(host))
        device = dist.ProcessGroupGloo.create_device(hostname=host)
        address = next((address for address in _listening(host) if address not in before), None)
    if address is None:
        raise RuntimeError(f"gloo listens on no port of {host}: is that an address of this machine?")
    return device, address


def _listening(host: str) -> Iterator[_Address]:
    for sock in _sockets():
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address: _Address = sock.getsockname()[:2]
                if address[0] == host:
                    yield address


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of each socket of this process, to be closed by the caller."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was faster


def _bytes(contiguous: Tensor) -> Tensor:
    if not contiguous.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(byte_view(contiguous), dtype=torch.uint8)
