"""Messages from one to another, and objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transport.conformance.registry import Run, on_gloo, operation


@operation
def send_and_receive_around(run: Run) -> list[Tensor]:
    following, previous = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    if run.size == 1:
        return []
    received = [run.room(), run.room(3)]
    operations = [
        dist.P2POp(dist.isend, run.own(), group=run.group, group_peer=following, tag=1),
        dist.P2POp(dist.irecv, received[0], group=run.group, group_peer=previous, tag=1),
        dist.P2POp(dist.isend, run.own(1, 3), group=run.group, group_peer=following, tag=2),
        dist.P2POp(dist.irecv, received[1], group=run.group, group_peer=previous, tag=2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@operation
def receive_by_tag_in_another_order(run: Run) -> list[Tensor]:
    """The last message is asked for first."""
    if run.size == 1 or run.rank > 1:
        return []
    if run.rank == 0:
        works = [dist.isend(run.own(tag, 5 + tag), group=run.group, group_dst=1, tag=tag) for tag in range(3)]
        for work in works:
            assert work is not None
            work.wait()
        return []
    received = [run.room(5 + tag) for tag in range(3)]
    for tag in (2, 0, 1):
        dist.recv(received[tag], group=run.group, group_src=0, tag=tag)
    return received


@operation
def receive_from_anybody(run: Run) -> list[Tensor]:
    """The root hears from everybody once, in whatever order, and knows who it was."""
    if run.rank != run.case.root:
        dist.send(run.own(), group=run.group, group_dst=run.case.root, tag=9)
        return []
    by_sender: dict[int, Tensor] = {}
    for _ in range(run.size - 1):
        received = run.room()
        sender = dist.recv(received, group=run.group, tag=9)
        by_sender[dist.get_group_rank(run.group, sender)] = received
    return [by_sender[sender] for sender in range(run.size) if sender != run.rank]


@on_gloo("receive_from_anybody")
def _receive_from_each(run: Run) -> list[Tensor]:
    """In order of rank: what came first is of no interest here."""
    if run.rank != run.case.root:
        dist.send(run.own(), group=run.group, group_dst=run.case.root, tag=9)
        return []
    received = {sender: run.room() for sender in range(run.size) if sender != run.rank}
    for sender, tensor in received.items():
        dist.recv(tensor, group=run.group, group_src=sender, tag=9)
    return list(received.values())


@operation
def objects(run: Run) -> list[Tensor]:
    """As bytes, so that they compare like the rest."""
    mine = {"rank": run.rank, "pad": "x" * (run.case.seed % 100 * run.rank)}
    everybody: list[Any] = [None] * run.size
    dist.all_gather_object(everybody, mine, group=run.group)
    listed: list[Any] = [mine, [run.rank]]
    dist.broadcast_object_list(listed, group=run.group, group_src=run.case.root)
    collected: list[Any] | None = [None] * run.size if run.rank == run.case.root else None
    dist.gather_object(mine, collected, group=run.group, group_dst=run.case.root)
    given: list[Any] = [None]
    parts = [f"for {member}" * (member + 1) for member in range(run.size)] if run.rank == run.case.root else None
    dist.scatter_object_list(given, parts, group=run.group, group_src=run.case.root)
    passed: list[Any] = [None, None]
    if run.size > 1 and run.rank == 0:
        dist.send_object_list([mine, "second"], group=run.group, group_dst=1)
    elif run.rank == 1:
        dist.recv_object_list(passed, group=run.group, group_src=0)
    text = repr([everybody, listed, collected, given, passed])
    return [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)]
