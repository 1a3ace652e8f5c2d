"""The algorithms in which all members do the same, on the links of one group. They work on tensors in place and run in the
group's thread. Those with a root are in `rooted`.

The order of summation depends on the number of members and the size of the message alone. Small ones are combined up the tree:
every member adds its children's sums to its own value, in order of rank. Large ones go around the ring, where segment s is summed
in the order s+1, s+2, …, s; so do the blocks of a reduce-scatter, whatever their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tmd_worker.core.ballot import tree_children, tree_parent
from tmd_worker.transport import native
from tmd_worker.transport.exchange import exchange, exchange_all, frames
from tmd_worker.transport.inner import InnerGroup
from tmd_worker.transport.link import Link
from tmd_worker.transport.tensors import (
    SMALL_BYTES,
    Reduction,
    byte_view,
    combine,
    finish,
    flat,
    from_bytes,
    put_back,
    size_bytes,
)
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind

_NOTHING = memoryview(b"")
#: Segments of the ring begin at multiples of this many elements, so that frames never cut one.
_SEGMENT_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkTable:
    """The links of one group in one epoch, by group rank, and this process's place in it."""

    epoch: int
    rank: int
    size: int
    links: dict[int, Link]
    #: Carries the collectives instead of the links.
    inner: InnerGroup | None = None

    def hold(self) -> None:
        for link in self.links.values():
            link.hold()

    def release(self) -> None:
        for link in self.links.values():
            link.release()


def barrier(table: LinkTable) -> None:
    """Nobody leaves before everybody has come."""
    if native.barrier(table):
        return
    children = tree_children(table.rank, table.size)
    parent = tree_parent(table.rank)
    for child in children:
        table.links[child].receive_small(Kind.DATA, table.epoch, 0)
    if parent is not None:
        table.links[parent].send(Kind.DATA, table.epoch, _NOTHING)
        table.links[parent].receive_small(Kind.DATA, table.epoch, 0)
    for child in children:
        table.links[child].send(Kind.DATA, table.epoch, _NOTHING)


def allreduce(table: LinkTable, tensor: Tensor, kind: Reduction) -> None:
    """Every member ends with the same bits."""
    total = flat(tensor)
    if table.size > 1 and total.numel():
        if size_bytes(total) <= SMALL_BYTES:
            if not native.tree_allreduce(table, total, kind):
                combine_up(table, total, kind)
                _hand_down(table, byte_view(total))
        else:
            segments = ring_segments(total, table.size)
            if not native.ring_allreduce(table, segments, kind):
                ring_reduce(table, segments, kind)
                _ring_gather(table, [byte_view(segment) for segment in segments])
    put_back(total, tensor)


def allgather(table: LinkTable, outputs: Sequence[Tensor], own: Tensor) -> None:
    """outputs[i] = what member i passed as `own`. Sizes may differ between members, if all know them."""
    blocks = [flat(output) for output in outputs]
    blocks[table.rank].copy_(flat(own))
    _ring_gather(table, [byte_view(block) for block in blocks])
    for block, output in zip(blocks, outputs, strict=True):
        put_back(block, output)


def reduce_scatter(table: LinkTable, output: Tensor, blocks: Sequence[Tensor], kind: Reduction) -> None:
    """output = the reduction of everybody's blocks[own rank]. The blocks are overwritten."""
    own = blocks[table.rank]
    ring_reduce(table, blocks, kind)
    output.detach().copy_(own.view(output.shape))


def alltoall(table: LinkTable, links: Mapping[int, Link], outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """incoming[i] = what member i passed as outgoing[own rank]. `links`: to every other member, by group rank."""
    rank, size = table.rank, table.size
    incoming[rank].copy_(outgoing[rank])
    targets = [(rank + distance) % size for distance in range(1, size)]
    sources = [(rank - distance) % size for distance in range(1, size)]
    exchange_all(
        [(links[target], outgoing[target]) for target in targets],
        [(links[source], incoming[source]) for source in sources],
        table.epoch,
    )


def combine_up(table: LinkTable, total: Tensor, kind: Reduction) -> None:
    """Afterwards member 0 has the reduction; the others hold partial sums."""
    if native.tree_reduce(table, total, kind):
        return
    for child in tree_children(table.rank, table.size):
        part = table.links[child].receive_small(Kind.DATA, table.epoch, size_bytes(total))
        combine(kind, total, from_bytes(part, total.dtype))
    parent = tree_parent(table.rank)
    if parent is None:
        finish(kind, total, table.size)
    else:
        table.links[parent].send(Kind.DATA, table.epoch, byte_view(total))


def _hand_down(table: LinkTable, data: memoryview) -> None:
    """From member 0 to everybody."""
    parent = tree_parent(table.rank)
    if parent is not None:
        data[:] = table.links[parent].receive_small(Kind.DATA, table.epoch, len(data))
    for child in tree_children(table.rank, table.size):
        table.links[child].send(Kind.DATA, table.epoch, data)


def ring_reduce(table: LinkTable, segments: Sequence[Tensor], kind: Reduction) -> None:
    """Afterwards segment `rank` is complete here; the others hold partial sums."""
    if table.size > 1 and not native.ring_reduce(table, segments, kind):
        _ring_reduce(table, segments, kind)
    finish(kind, segments[table.rank], table.size)


def _ring_reduce(table: LinkTable, segments: Sequence[Tensor], kind: Reduction) -> None:
    rank, size = table.rank, table.size
    following, previous = table.links[(rank + 1) % size], table.links[(rank - 1) % size]
    dtype = segments[0].dtype
    frame_elements = MAX_PAYLOAD_BYTES // segments[0].element_size()
    scratch = torch.empty(min(frame_elements, max(segment.numel() for segment in segments)), dtype=dtype, device="cpu")
    room = byte_view(scratch)
    for turn in range(size - 1):
        outgoing = segments[(rank - turn - 1) % size]
        target = segments[(rank - turn - 2) % size]
        starts = range(0, target.numel(), frame_elements)
        pieces = [target[start : start + frame_elements] for start in starts]

        def add(number: int, pieces: Sequence[Tensor] = pieces) -> None:
            combine(kind, pieces[number], scratch[: pieces[number].numel()])

        incoming = [room[: size_bytes(piece)] for piece in pieces]
        exchange(following, frames(byte_view(outgoing)), previous, incoming, table.epoch, add)


def _ring_gather(table: LinkTable, blocks: Sequence[memoryview]) -> None:
    """Every member has its own block; afterwards everybody has all."""
    rank, size = table.rank, table.size
    if size == 1 or native.ring_gather(table, blocks):
        return
    following, previous = table.links[(rank + 1) % size], table.links[(rank - 1) % size]
    for turn in range(size - 1):
        outgoing = frames(blocks[(rank - turn) % size])
        incoming = frames(blocks[(rank - turn - 1) % size])
        exchange(following, outgoing, previous, incoming, table.epoch)


def ring_segments(total: Tensor, size: int) -> list[Tensor]:
    """`size` pieces, the last ones shorter or empty."""
    elements = total.numel()
    each = -(-elements // size)
    each = -(-each // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
    return [total[min(i * each, elements) : min((i + 1) * each, elements)] for i in range(size)]
