"""Which members of a group hold a link to each other: ring neighbours and binary-tree neighbours, no full mesh. Group ranks."""

from __future__ import annotations

import functools

from tmd.protocol.membership import buddy_of, ward_of
from tmd_worker.core.ballot import tree_children, tree_parent


def tree_neighbours(rank: int, size: int) -> set[int]:
    """Parent and children in the tree rooted at rank 0."""
    parent = tree_parent(rank)
    return {*tree_children(rank, size), *(() if parent is None else (parent,))}


def collective_neighbours(rank: int, size: int) -> set[int]:
    """What the collectives of one group need."""
    return (tree_neighbours(rank, size) | {(rank - 1) % size, (rank + 1) % size}) - {rank}


def buddy_neighbours(rank: int, world_size: int, nproc_per_node: int) -> set[int]:
    """The buddy and the ward, which may be the same rank."""
    return {buddy_of(rank, world_size, nproc_per_node), ward_of(rank, world_size, nproc_per_node)} - {rank}


def next_hop(rank: int, root: int) -> int:
    """The tree neighbour of `rank` on the way to `root`, which is another rank."""
    at = root
    while at:
        above = (at - 1) // 2
        if above == rank:
            return at
        at = above
    return (rank - 1) // 2


@functools.cache
def branch(rank: int, size: int, away_from: int | None) -> tuple[int, ...]:
    """Everybody who is reached from `rank` without going by its neighbour `away_from`: `rank` itself, then branch by branch."""
    found = [rank]
    for neighbour in branches(rank, size, away_from):
        found += branch(neighbour, size, rank)
    return tuple(found)


def branches(rank: int, size: int, away_from: int | None) -> list[int]:
    """The tree neighbours of `rank` but for `away_from`, in order."""
    return sorted(tree_neighbours(rank, size) - {away_from})
