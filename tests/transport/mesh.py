"""Several fabrics in one process, each as one rank, for what needs no process of its own."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.transport.ranks import DEADLINE_S, JOB_KEY, Events
from tmd.protocol.control import TransportName
from tmd.protocol.membership import Member, Membership, Plan
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.shell import TmdProcessGroup

LEFT_BEHIND_S = 10.0


@dataclasses.dataclass
class Node:
    """One fabric, its events and its shell of the group of all ranks."""

    incarnation: str
    rank: int
    fabric: Fabric
    events: Events
    world: TmdProcessGroup

    @property
    def member(self) -> Member:
        return Member(incarnation=self.incarnation, node=self.incarnation, host=self.fabric.host, port=self.fabric.port)


class Mesh:
    """Ranks 0 to size-1, and any number of further processes."""

    def __init__(self, size: int, host: str = "127.0.0.1", transport: TransportName = "delta") -> None:
        self.size = size
        self.host = host
        self.transport = transport
        self.nodes: list[Node] = []

    def add(self, incarnation: str, rank: int, *, key: bytes = JOB_KEY) -> Node:
        events = Events()
        fabric = Fabric(host=self.host, job_key=key, incarnation=incarnation, events=events, transport=self.transport)
        events.fabric = fabric
        fabric.set_role(rank, self.size, 1)
        world = TmdProcessGroup(fabric, rank, tuple(range(self.size)), DEADLINE_S)
        world._set_group_name("world")
        node = Node(incarnation, rank, fabric, events, world)
        self.nodes.append(node)
        return node

    def table(self, epoch: int, **changed: Node) -> Membership:
        """The first `size` nodes; `r2=node` puts another one into that role."""
        members = {node.rank: node.member for node in self.nodes[: self.size]}
        members |= {int(name[1:]): node.member for name, node in changed.items()}
        return Membership(epoch=epoch, members=members)

    def go_live(self, table: Membership, nodes: list[Node] | None = None) -> None:
        chosen = self.nodes[: self.size] if nodes is None else nodes
        together(chosen, lambda node: node.fabric.open(table, node.rank, DEADLINE_S))
        for node in chosen:
            node.fabric.activate(table.epoch)
            node.events.run_epoch = table.epoch

    def check_threads(self) -> None:
        for node in self.nodes:
            assert not node.events.died, node.events.died


@contextmanager
def mesh(size: int, *, live: bool = True, host: str = "127.0.0.1", transport: TransportName = "delta") -> Iterator[Mesh]:
    """All on the same address, linked in epoch 0 if `live`. Nothing may be left behind, no descriptor either."""
    before = descriptors()
    made = Mesh(size, host, transport)
    try:
        for rank in range(size):
            made.add(f"inc-{rank}", rank)
        if live:
            made.go_live(made.table(0))
        yield made
        made.check_threads()
    finally:
        for node in made.nodes:
            node.fabric.close_all()
    # What an earlier test, or a thread of this one, is still giving back may go; nothing may come.
    wait_until(lambda: descriptors().items() <= before.items(), LEFT_BEHIND_S)


def descriptors() -> dict[str, str]:
    """This process's sockets, event counters and the like."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the directory's own
        if target.startswith(("socket:", "anon_inode:")):
            found[fd] = target
    return found


def plan_of(table: Membership, base: Membership, *leavers: int, plan_id: int = 1) -> Plan:
    return Plan(
        plan_id=plan_id,
        migration_id="m1",
        base_epoch=base.epoch,
        leavers={rank: base.members[rank].incarnation for rank in leavers},
        successor=table,
    )


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Fails if it does not become true in time."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true"
        time.sleep(0.001)


def together(items: list[Any], action: Callable[[Any], Any]) -> list[Any]:
    """`action` on every item at the same time; the results in order. The first exception is raised."""
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = action(items[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive(), "still blocked"
    if errors:
        raise errors[0]
    return results
