"""The algorithms with a root, along the tree, which spans the group whoever the root is. They run in the group's thread.

What is only for some goes only towards them: of a gather or scatter every link carries what belongs to the branch behind it, so
no link is needed that the other collectives do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tmd_worker.core.ballot import tree_parent
from tmd_worker.transport import native
from tmd_worker.transport.collectives import LinkTable, combine_up, frames, ring_reduce, ring_segments
from tmd_worker.transport.link import Link
from tmd_worker.transport.tensors import SMALL_BYTES, Reduction, byte_view, flat, put_back, size_bytes
from tmd_worker.transport.topology import branch, branches, next_hop
from tmd_worker.transport.wire import MAX_PAYLOAD_BYTES, Kind

_NOTHING = memoryview(b"")


def broadcast(table: LinkTable, tensor: Tensor, root: int) -> None:
    """Frame by frame, so that the next ones are on their way while the first ones are passed on."""
    data = flat(tensor)
    towards = _towards(table, root)
    targets = branches(table.rank, table.size, towards)
    if not native.broadcast(table, data, towards, targets):
        for piece in frames(byte_view(data)):
            if towards is not None:
                table.links[towards].receive(Kind.DATA, table.epoch, piece)
            for target in targets:
                table.links[target].send(Kind.DATA, table.epoch, piece)
    if towards is not None:
        put_back(data, tensor)


def gather(table: LinkTable, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
    """At the root blocks[i] = what member i passed as `own`, all of one size; None on the others."""
    mine = flat(own)
    if blocks is None:
        _gather(table, [_NOTHING] * table.size, byte_view(mine), [size_bytes(mine)] * table.size, root)
        return
    copies = [flat(block) for block in blocks]
    copies[table.rank].copy_(mine)
    _gather(table, [byte_view(copy) for copy in copies], byte_view(mine), [size_bytes(copy) for copy in copies], root)
    for copy, block in zip(copies, blocks, strict=True):
        put_back(copy, block)


def scatter(table: LinkTable, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
    """output = what the root passed as blocks[own rank], all of one size; None on the others."""
    target = flat(output)
    if blocks is not None:
        parts = [byte_view(flat(block)) for block in blocks]
        for neighbour in branches(root, table.size, None):
            for member in branch(neighbour, table.size, root):
                for piece in frames(parts[member]):
                    table.links[neighbour].send(Kind.DATA, table.epoch, piece)
        target.copy_(flat(blocks[root]))  # last: it may be the memory of another block
    else:
        towards = next_hop(table.rank, root)
        source = table.links[towards]
        for piece in frames(byte_view(target)):
            source.receive(Kind.DATA, table.epoch, piece)
        relay = _relay(table, size_bytes(target))
        for neighbour in branches(table.rank, table.size, towards):
            for _ in branch(neighbour, table.size, table.rank):
                relay(source, table.links[neighbour], size_bytes(target))
    put_back(target, output)


def reduce(table: LinkTable, total: Tensor, kind: Reduction, root: int) -> None:
    """At the root `total` becomes the reduction, with the bits that an all-reduce yields; elsewhere it is overwritten.

    `total` is contiguous and of one dimension.
    """
    if table.size == 1 or not total.numel():
        return
    if size_bytes(total) <= SMALL_BYTES:
        combine_up(table, total, kind)
        _carry(table, byte_view(total), root)
        return
    segments = ring_segments(total, table.size)
    ring_reduce(table, segments, kind)
    parts = [byte_view(segment) for segment in segments]
    _gather(table, parts, parts[table.rank], [len(part) for part in parts], root)


def _gather(table: LinkTable, blocks: Sequence[memoryview], own: memoryview, sizes: Sequence[int], root: int) -> None:
    """`blocks` is written at the root alone; there the own one is in place."""
    towards = _towards(table, root)
    relay = _relay(table, max(sizes))
    if towards is not None:
        for piece in frames(own):
            table.links[towards].send(Kind.DATA, table.epoch, piece)
    for neighbour in branches(table.rank, table.size, towards):
        source = table.links[neighbour]
        for member in branch(neighbour, table.size, table.rank):
            if towards is None:
                for piece in frames(blocks[member]):
                    source.receive(Kind.DATA, table.epoch, piece)
            else:
                relay(source, table.links[towards], sizes[member])


def _carry(table: LinkTable, data: memoryview, root: int) -> None:
    """From member 0 down to the root; everybody else is done."""
    on_the_way = [root]
    while (above := tree_parent(on_the_way[-1])) is not None:
        on_the_way.append(above)
    if table.rank not in on_the_way:
        return
    parent = tree_parent(table.rank)
    if parent is not None:
        table.links[parent].receive(Kind.DATA, table.epoch, data)
    if table.rank != root:
        table.links[next_hop(table.rank, root)].send(Kind.DATA, table.epoch, data)


def _towards(table: LinkTable, root: int) -> int | None:
    return None if table.rank == root else next_hop(table.rank, root)


def _relay(table: LinkTable, largest_bytes: int) -> Callable[[Link, Link, int], None]:
    """Passes a block of so many bytes on from one link to another, through a buffer of at most one frame."""
    room = memoryview(bytearray(min(largest_bytes, MAX_PAYLOAD_BYTES)))

    def relay(source: Link, target: Link, block_bytes: int) -> None:
        for start in range(0, block_bytes, MAX_PAYLOAD_BYTES):
            piece = room[: min(block_bytes - start, MAX_PAYLOAD_BYTES)]
            source.receive(Kind.DATA, table.epoch, piece)
            target.send(Kind.DATA, table.epoch, piece)

    return relay
