"""The two ends of one link in a mesh, and native exchanges over one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.transport.mesh import Mesh
from tests.transport.ranks import Rank
from tmd_worker.transport.link import Link
from tmd_worker.transport.native import exchange

FRAME = 1 << 20


def link_to(rank: Rank, peer: int) -> Link:
    """Of the group of all ranks, in a rank process."""
    table = next(group.table for name, group in rank.fabric._groups.items() if not name.startswith("tmd."))
    assert table is not None
    return table.links[peer]


def two_ends(made: Mesh) -> tuple[Link, Link]:
    """Rank 0's and rank 1's end of their link in the group of all ranks."""
    tables = [node.fabric._groups["world"].table for node in made.nodes]
    assert tables[0] is not None
    assert tables[1] is not None
    return tables[0].links[1], tables[1].links[0]


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """`action` in a thread; afterwards the list holds what it returned, or the exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def swap(link: Link, outgoing: list[int], incoming: list[int]) -> bytearray:
    """A native exchange over one link, of frames with these sizes; returns what was received, all in one."""
    room = bytearray(b"\xaa" * sum(incoming))
    swap_into(link, outgoing, incoming, room)
    return room


def swap_into(link: Link, outgoing: list[int], incoming: list[int], room: bytearray) -> None:
    view, start, places = memoryview(room), 0, []
    for size in incoming:
        places.append(view[start : start + size])
        start += size
    link.hold()
    try:
        with link.tx_lock:
            assert exchange(link, [memoryview(bytearray(size)) for size in outgoing], link, places, 0)
    finally:
        link.release()
