"""The algorithms, on the links of one group. They work on tensors in place and run in the group's thread.

The order of summation depends on the number of members and the size of the message alone: small ones are combined up the
tree (children in order of rank), large ones around the ring, where segment s is summed in the order s+1, s+2, …, s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tmd_worker.core.ballot import tree_children, tree_parent
from tmd_worker.transport.exchange import exchange
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
from tmd_worker.transport.topology import next_hop, tree_neighbours
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

    def hold(self) -> None:
        for link in self.links.values():
            link.hold()

    def release(self) -> None:
        for link in self.links.values():
            link.release()


def barrier(table: LinkTable) -> None:
    """Nobody leaves before everybody has come."""
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
            _tree_allreduce(table, total, kind)
        else:
            segments = _segments(total, table.size)
            _ring_reduce(table, segments, kind)
            finish(kind, segments[table.rank], table.size)
            _ring_gather(table, [byte_view(segment) for segment in segments])
    put_back(total, tensor)


def broadcast(table: LinkTable, tensor: Tensor, root: int) -> None:
    """Frame by frame along the tree, which spans the group whoever is the root."""
    data = flat(tensor)
    neighbours = sorted(tree_neighbours(table.rank, table.size))
    source = None if table.rank == root else next_hop(table.rank, root)
    for piece in _frames(byte_view(data)):
        if source is not None:
            table.links[source].receive(Kind.DATA, table.epoch, piece)
        for neighbour in neighbours:
            if neighbour != source:
                table.links[neighbour].send(Kind.DATA, table.epoch, piece)
    if source is not None:
        put_back(data, tensor)


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
    _ring_reduce(table, blocks, kind)
    finish(kind, own, table.size)
    output.detach().copy_(own.view(output.shape))


def _tree_allreduce(table: LinkTable, total: Tensor, kind: Reduction) -> None:
    view = byte_view(total)
    children = tree_children(table.rank, table.size)
    parent = tree_parent(table.rank)
    for child in children:
        part = table.links[child].receive_small(Kind.DATA, table.epoch, len(view))
        combine(kind, total, from_bytes(part, total.dtype))
    if parent is None:
        finish(kind, total, table.size)
    else:
        table.links[parent].send(Kind.DATA, table.epoch, view)
        view[:] = table.links[parent].receive_small(Kind.DATA, table.epoch, len(view))
    for child in children:
        table.links[child].send(Kind.DATA, table.epoch, view)


def _ring_reduce(table: LinkTable, segments: Sequence[Tensor], kind: Reduction) -> None:
    """Afterwards segment `rank` is complete here; the others hold partial sums."""
    rank, size = table.rank, table.size
    if size == 1:
        return
    following, previous = table.links[(rank + 1) % size], table.links[(rank - 1) % size]
    dtype = segments[0].dtype
    frame_elements = MAX_PAYLOAD_BYTES // segments[0].element_size()
    scratch = torch.empty(min(frame_elements, max(segment.numel() for segment in segments)), dtype=dtype)
    room = byte_view(scratch)
    for turn in range(size - 1):
        outgoing = segments[(rank - turn - 1) % size]
        target = segments[(rank - turn - 2) % size]
        starts = range(0, target.numel(), frame_elements)
        pieces = [target[start : start + frame_elements] for start in starts]

        def add(number: int, pieces: Sequence[Tensor] = pieces) -> None:
            combine(kind, pieces[number], scratch[: pieces[number].numel()])

        incoming = [room[: size_bytes(piece)] for piece in pieces]
        exchange(following, _frames(byte_view(outgoing)), previous, incoming, table.epoch, add)


def _ring_gather(table: LinkTable, blocks: Sequence[memoryview]) -> None:
    """Every member has its own block; afterwards everybody has all."""
    rank, size = table.rank, table.size
    if size == 1:
        return
    following, previous = table.links[(rank + 1) % size], table.links[(rank - 1) % size]
    for turn in range(size - 1):
        outgoing = _frames(blocks[(rank - turn) % size])
        incoming = _frames(blocks[(rank - turn - 1) % size])
        exchange(following, outgoing, previous, incoming, table.epoch)


def _segments(total: Tensor, size: int) -> list[Tensor]:
    """`size` pieces, the last ones shorter or empty."""
    elements = total.numel()
    each = -(-elements // size)
    each = -(-each // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
    return [total[min(i * each, elements) : min((i + 1) * each, elements)] for i in range(size)]


def _frames(data: memoryview) -> list[memoryview]:
    """At most 1 MiB each; none for no data."""
    return [data[start : start + MAX_PAYLOAD_BYTES] for start in range(0, len(data), MAX_PAYLOAD_BYTES)]
