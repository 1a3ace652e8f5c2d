"""The algorithms with a root. They run in the group's thread.

Small blocks of a gather or scatter, and whatever is small of a reduction, go along the tree, which spans the group whoever the
root is: a link carries what belongs to the branch behind it, in one message. Larger blocks go straight between the root and their
member, so that nobody copies what it only passes on, over links that are opened when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tmd_worker.core.ballot import tree_parent
from tmd_worker.transport import native
from tmd_worker.transport.collectives import LinkTable, combine_up, ring_reduce, ring_segments
from tmd_worker.transport.exchange import exchange_all, frames
from tmd_worker.transport.link import Held, Link
from tmd_worker.transport.tensors import SMALL_BYTES, Reduction, byte_view, flat, put_back, size_bytes
from tmd_worker.transport.topology import branch, branches, next_hop
from tmd_worker.transport.wire import Kind

#: Blocks up to this size go along the tree. All members must agree about it.
TREE_BLOCK_BYTES = 16 << 10

#: Of a large reduction, of all segments together.
_CHUNK_BYTES = 8 << 20

#: Yields links to these members, by group rank.
Direct = Callable[[frozenset[int]], Held]


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


def gather(table: LinkTable, direct: Direct, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
    """At the root blocks[i] = what member i passed as `own`, all of one size; None on the others."""
    mine = flat(own)
    copies = [flat(block) for block in blocks or ()]
    if blocks is not None:
        copies[root].copy_(mine)
    _gather(table, direct, copies, mine, [mine.numel()] * table.size, root)
    for copy, block in zip(copies, blocks or (), strict=True):
        put_back(copy, block)


def scatter(table: LinkTable, direct: Direct, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
    """output = what the root passed as blocks[own rank], all of one size; None on the others."""
    target = flat(output)
    parts = [flat(block) for block in blocks or ()]
    if size_bytes(target) <= TREE_BLOCK_BYTES:
        _scatter_down(table, target, parts, root)
    else:
        with direct(_ends(table, root)) as links:
            outgoing = [(link, parts[member]) for member, link in links.items()] if blocks is not None else []
            incoming = [(links[root], target)] if blocks is None else []
            exchange_all(outgoing, incoming, table.epoch)
    if blocks is not None:
        target.copy_(parts[root])  # last: it may be the memory of another block
    put_back(target, output)


def reduce(table: LinkTable, direct: Direct, total: Tensor, kind: Reduction, root: int) -> None:
    """At the root `total` becomes the reduction, with the bits that an all-reduce yields; elsewhere it stays as it is.

    `total` is contiguous and of one dimension. Who is not the root adds up in a copy of it, chunk by chunk: memory that stays in
    the processor's cache and is not new each time.
    """
    at_root = table.rank == root
    if table.size == 1 or not total.numel():
        return
    if size_bytes(total) <= SMALL_BYTES:
        sums = total if at_root else total.clone()
        combine_up(table, sums, kind)
        _carry(table, sums, root)
        return
    segments = ring_segments(total, table.size)
    longest = segments[0].numel()
    each = min(longest, _CHUNK_BYTES // table.size // total.element_size() + 1)
    room = None if at_root else total.new_empty(table.size * each)
    for start in range(0, longest, each):
        pieces = [segment[start : start + each] for segment in segments]
        if room is not None:
            pieces = _copied(pieces, room)
        ring_reduce(table, pieces, kind)
        _gather(table, direct, pieces, pieces[table.rank], [piece.numel() for piece in pieces], root)


def _copied(pieces: Sequence[Tensor], room: Tensor) -> list[Tensor]:
    """One behind the other."""
    copies, start = [], 0
    for piece in pieces:
        copies.append(room[start : start + piece.numel()].copy_(piece))
        start += piece.numel()
    return copies


def _gather(table: LinkTable, direct: Direct, blocks: Sequence[Tensor], own: Tensor, sizes: Sequence[int], root: int) -> None:
    """`blocks` is written at the root alone; there the own one is in place. `sizes`: of everybody's, in elements."""
    if max(sizes) * own.element_size() <= TREE_BLOCK_BYTES:
        _gather_up(table, blocks, own, sizes, root)
        return
    with direct(_ends(table, root)) as links:
        at_root = table.rank == root
        outgoing = [] if at_root else [(links[root], own)]
        incoming = [(link, blocks[member]) for member, link in links.items()] if at_root else []
        exchange_all(outgoing, incoming, table.epoch)


def _ends(table: LinkTable, root: int) -> frozenset[int]:
    """Whom this member exchanges with when all goes straight to the root or comes from there."""
    return frozenset(range(table.size)) - {root} if table.rank == root else frozenset({root})


def _gather_up(table: LinkTable, blocks: Sequence[Tensor], own: Tensor, sizes: Sequence[int], root: int) -> None:
    towards = _towards(table, root)
    parcels = _parcels(table, towards)
    if towards is None:
        rooms = [_room(own, members, sizes) if len(members) > 1 else blocks[members[0]] for _, members in parcels]
        exchange_all([], [(link, room) for (link, _), room in zip(parcels, rooms, strict=True)], table.epoch)
        for (_, members), room in zip(parcels, rooms, strict=True):
            if len(members) > 1:
                for part, member in zip(room.split_with_sizes([sizes[member] for member in members]), members, strict=True):
                    blocks[member].copy_(part)
        return
    whole = own
    if parcels:
        whole = _room(own, branch(table.rank, table.size, towards), sizes)
        mine, *rooms = whole.split_with_sizes([own.numel(), *(sum(sizes[m] for m in members) for _, members in parcels)])
        mine.copy_(own)
        exchange_all([], [(link, room) for (link, _), room in zip(parcels, rooms, strict=True)], table.epoch)
    exchange_all([(table.links[towards], whole)], [], table.epoch)


def _scatter_down(table: LinkTable, target: Tensor, parts: Sequence[Tensor], root: int) -> None:
    towards = _towards(table, root)
    parcels = _parcels(table, towards)
    each = target.numel()
    if towards is None:
        outgoing = [(link, _packed([parts[member] for member in members])) for link, members in parcels]
    else:
        whole = target
        if parcels:
            whole = target.new_empty(each * (1 + sum(len(members) for _, members in parcels)))
        exchange_all([], [(table.links[towards], whole)], table.epoch)
        mine, *rooms = whole.split_with_sizes([each, *(each * len(members) for _, members in parcels)])
        if parcels:
            target.copy_(mine)
        outgoing = [(link, room) for (link, _), room in zip(parcels, rooms, strict=True)]
    exchange_all(outgoing, [], table.epoch)


def _parcels(table: LinkTable, towards: int | None) -> list[tuple[Link, tuple[int, ...]]]:
    """The links that lead away from the root, and which members' blocks each carries, in order."""
    near = branches(table.rank, table.size, towards)
    return [(table.links[neighbour], branch(neighbour, table.size, table.rank)) for neighbour in near]


def _room(like: Tensor, members: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return like.new_empty(sum(sizes[member] for member in members))


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One behind the other."""
    if len(parts) == 1:
        return parts[0]
    room = parts[0].new_empty(sum(part.numel() for part in parts))
    _copied(parts, room)
    return room


def _carry(table: LinkTable, total: Tensor, root: int) -> None:
    """From member 0 down to the root; everybody else is done."""
    on_the_way = [root]
    while (above := tree_parent(on_the_way[-1])) is not None:
        on_the_way.append(above)
    if table.rank not in on_the_way:
        return
    parent = tree_parent(table.rank)
    if parent is not None:
        exchange_all([], [(table.links[parent], total)], table.epoch)
    if table.rank != root:
        exchange_all([(table.links[next_hop(table.rank, root)], total)], [], table.epoch)


def _towards(table: LinkTable, root: int) -> int | None:
    return None if table.rank == root else next_hop(table.rank, root)
