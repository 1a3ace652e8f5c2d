"""Which living ranks the joiners of a recovery take their state from. Pure.

Contract: every replica has the same bytes, so the choice is about who can still be relied on, and about wires. In this order:
- Nobody on a node where a rank was lost, unless there is nobody else: what struck that node may strike again.
- Those that share the fewest failure domains (labels of nodes: rack, zone) with such a node, as soon as there are LEAST of them.
- One rank of each node before a second one of any: ranks of a node share its network.
- The joiners share the sources out among themselves, as far as there are enough: pairs that run side by side, each at its own
  speed. But each gets LEAST of them if there are, so that one that fails in the middle leaves its rest to another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping

#: The most for one joiner: its own network is full long before, and each costs three connections.
MOST = 4
LEAST = 2


def nearness(nodes: Mapping[str, Mapping[str, str]], failed: Collection[str]) -> dict[str, float]:
    """`nodes`: node -> its labels. Node -> how many of them it shares with one that failed; infinite for such a one itself."""
    lost = [nodes[node].items() for node in failed if node in nodes]
    shared = {node: max((len(labels.items() & each) for each in lost), default=0) for node, labels in nodes.items()}
    return {**shared, **dict.fromkeys(failed, math.inf)}


def choose(joiners: Collection[int], living: Mapping[int, str], near: Mapping[str, float], turn: int) -> dict[int, list[int]]:
    """Rank that joins -> its sources, best first; empty: there is none. `living`: rank -> its node. `near`: see `nearness`; 0 for
    nodes that are missing. `turn`: how many attempts have failed; another one begins with others."""
    candidates = _spread(_apart(living, near))
    if not candidates:
        return {rank: [] for rank in joiners}
    share = min(max(len(candidates) // max(len(joiners), 1), LEAST), MOST, len(candidates))
    return {
        rank: [candidates[(place * share + turn + number) % len(candidates)] for number in range(share)]
        for place, rank in enumerate(sorted(joiners))
    }


def _apart(living: Mapping[int, str], near: Mapping[str, float]) -> dict[int, str]:
    """Those that are farthest from what failed, LEAST of them if there are."""
    chosen: dict[int, str] = {}
    for distance in sorted({near.get(node, 0.0) for node in living.values()}):
        if len(chosen) >= LEAST or (chosen and math.isinf(distance)):
            break
        chosen |= {rank: node for rank, node in living.items() if near.get(node, 0.0) == distance}
    return chosen


def _spread(living: Mapping[int, str]) -> list[int]:
    """One rank of each node, then a second one of each, and so on."""
    by_node: dict[str, list[int]] = {}
    for rank, node in sorted(living.items()):
        by_node.setdefault(node, []).append(rank)
    rounds = itertools.zip_longest(*by_node.values())
    return [rank for ranks in rounds for rank in ranks if rank is not None]
