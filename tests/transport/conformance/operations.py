"""Each operation once, written so that it runs on any group of any backend; what gloo lacks is done with what it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.transport.conformance.cases import UNTOUCHED, Case, laid_out

Group = Any


@dataclasses.dataclass
class Run:
    """One case on one group, as the member that this process is. Layouts are for tmd: gloo refuses many."""

    case: Case
    group: Group
    gloo: bool

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.case.reduction)

    def _place(self, values: Tensor, rows: bool) -> Tensor:
        in_columns = self.case.layout == "transposed"
        return values if self.gloo or (rows and in_columns) else laid_out(values, self.case.layout)

    def own(self, part: int = 0, elements: int | None = None, *, rows: bool = False) -> Tensor:
        """What this member passes. `rows`: not in columns, so that it can be cut along the first dimension."""
        return self._place(self.case.values(self.rank, part, self.case.elements if elements is None else elements), rows)

    def room(self, elements: int | None = None, *, rows: bool = False) -> Tensor:
        count = self.case.elements if elements is None else elements
        return self._place(torch.full((count,), UNTOUCHED).to(self.case.dtype), rows)

    def rooms(self) -> list[Tensor]:
        return [self.room() for _ in range(self.size)]

    def uneven(self) -> list[int]:
        """A size for each member, some of them 0."""
        choose = self.case.choose()
        return [choose.choice([0, 1, self.case.elements // 2, self.case.elements]) for _ in range(self.size)]

    def splits(self) -> list[list[int]]:
        """[sender][receiver] -> rows."""
        choose = self.case.choose()
        most = max(self.case.elements // self.size // 3, 2)
        return [[choose.choice([0, 1, most, choose.randint(0, most)]) for _ in range(self.size)] for _ in range(self.size)]


Operation = Callable[[Run], list[Tensor]]
#: By name: how it is called, and how gloo yields the same.
OPERATIONS: dict[str, tuple[Operation, Operation]] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = (function, function)
    return function


def on_gloo(name: str) -> Callable[[Operation], Operation]:
    def note(function: Operation) -> Operation:
        OPERATIONS[name] = (OPERATIONS[name][0], function)
        return function

    return note


# -------------------------------------------------------------------- reductions


@operation
def all_reduce(run: Run) -> list[Tensor]:
    tensor = run.own()
    dist.all_reduce(tensor, run.op, group=run.group)
    return [tensor]


@operation
def all_reduce_coalesced(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7), run.own(2, 0)]
    dist.all_reduce_coalesced(tensors, run.op, group=run.group)
    return tensors


@on_gloo("all_reduce_coalesced")
def _one_by_one(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7), run.own(2, 0)]
    for tensor in tensors:
        dist.all_reduce(tensor, run.op, group=run.group)
    return tensors


@operation
def coalescing_manager(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    with dist._coalescing_manager(run.group, async_ops=True) as works:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.all_reduce(tensor, run.op, group=run.group)
    works.wait()
    return tensors


@operation
def coalescing_manager_of_a_device(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    with dist._coalescing_manager(run.group, torch.device("cpu"), async_ops=True) as works:  # type: ignore[attr-defined]
        for tensor in tensors:
            dist.broadcast(tensor, group=run.group, group_src=run.case.root, async_op=True)
    works.wait()
    return tensors


@on_gloo("coalescing_manager_of_a_device")
def _broadcasts(run: Run) -> list[Tensor]:
    tensors = [run.own(0), run.own(1, 7)]
    for tensor in tensors:
        dist.broadcast(tensor, group=run.group, group_src=run.case.root)
    return tensors


@operation
def reduce(run: Run) -> list[Tensor]:
    """Only the root's tensor is defined."""
    tensor = run.own()
    dist.reduce(tensor, op=run.op, group=run.group, group_dst=run.case.root)
    return [tensor] if run.rank == run.case.root else []


@on_gloo("reduce")
def _reduce_all(run: Run) -> list[Tensor]:
    """gloo's reduce leaves out the division of AVG."""
    total = all_reduce(run)
    return total if run.rank == run.case.root else []


@operation
def reduce_scatter(run: Run) -> list[Tensor]:
    output = run.room()
    dist.reduce_scatter(output, [run.own(part) for part in range(run.size)], run.op, group=run.group)
    return [output]


@operation
def reduce_scatter_uneven(run: Run) -> list[Tensor]:
    sizes = run.uneven()
    output = run.room(sizes[run.rank])
    dist.reduce_scatter(output, [run.own(part, size) for part, size in enumerate(sizes)], run.op, group=run.group)
    return [output]


@operation
def reduce_scatter_single(run: Run) -> list[Tensor]:
    output = run.room()
    dist.reduce_scatter_single(output, run.own(0, run.size * run.case.elements), run.op, group=run.group)
    return [output]


@on_gloo("reduce_scatter")
def _reduce_parts(run: Run) -> list[Tensor]:
    return _reduced_parts(run, [run.own(part) for part in range(run.size)])


@on_gloo("reduce_scatter_uneven")
def _reduce_uneven_parts(run: Run) -> list[Tensor]:
    return _reduced_parts(run, [run.own(part, size) for part, size in enumerate(run.uneven())])


@on_gloo("reduce_scatter_single")
def _reduce_whole(run: Run) -> list[Tensor]:
    return _reduced_parts(run, list(run.own(0, run.size * run.case.elements).view(run.size, -1).unbind(0)))


def _reduced_parts(run: Run, parts: list[Tensor]) -> list[Tensor]:
    """gloo's reduce-scatter leaves out the division of AVG, and does not take every type."""
    for part in parts:
        dist.all_reduce(part, run.op, group=run.group)
    return [parts[run.rank]]


# -------------------------------------------------------------------- moving


@operation
def broadcast(run: Run) -> list[Tensor]:
    tensor = run.own()
    dist.broadcast(tensor, group=run.group, group_src=run.case.root)
    return [tensor]


@operation
def all_gather(run: Run) -> list[Tensor]:
    outputs = run.rooms()
    dist.all_gather(outputs, run.own(), group=run.group)
    return outputs


@operation
def all_gather_uneven(run: Run) -> list[Tensor]:
    outputs = [run.room(size) for size in run.uneven()]
    dist.all_gather(outputs, run.own(0, run.uneven()[run.rank]), group=run.group)
    return outputs


@on_gloo("all_gather_uneven")
def _everybody_broadcasts(run: Run) -> list[Tensor]:
    outputs = [run.own(0, size) for size in run.uneven()]
    for member, output in enumerate(outputs):
        dist.broadcast(output, group=run.group, group_src=member)
    return outputs


@operation
def all_gather_single(run: Run) -> list[Tensor]:
    output = run.room(run.size * run.case.elements)
    dist.all_gather_single(output, run.own(), group=run.group)
    return [output]


@operation
def all_gather_coalesced(run: Run) -> list[Tensor]:
    outputs = [run.rooms(), [run.room(7) for _ in range(run.size)]]
    dist.all_gather_coalesced(outputs, [run.own(), run.own(1, 7)], group=run.group)
    return [tensor for tensors in outputs for tensor in tensors]


@on_gloo("all_gather_coalesced")
def _gather_one_by_one(run: Run) -> list[Tensor]:
    """gloo's own takes the size of the outer list for the inner one's."""
    outputs = [run.rooms(), [run.room(7) for _ in range(run.size)]]
    for tensors, own in zip(outputs, [run.own(), run.own(1, 7)], strict=True):
        dist.all_gather(tensors, own, group=run.group)
    return [tensor for tensors in outputs for tensor in tensors]


@operation
def gather(run: Run) -> list[Tensor]:
    outputs = run.rooms() if run.rank == run.case.root else None
    dist.gather(run.own(), outputs, group=run.group, group_dst=run.case.root)
    return outputs or []


@on_gloo("gather")
def _gather_everywhere(run: Run) -> list[Tensor]:
    """gloo's own refuses complex numbers."""
    outputs = all_gather(run)
    return outputs if run.rank == run.case.root else []


@operation
def scatter(run: Run) -> list[Tensor]:
    output = run.room()
    parts = [run.own(part) for part in range(run.size)] if run.rank == run.case.root else None
    dist.scatter(output, parts, group=run.group, group_src=run.case.root)
    return [output]


@operation
def all_to_all(run: Run) -> list[Tensor]:
    splits = run.splits()
    outputs = [run.room(splits[sender][run.rank]) for sender in range(run.size)]
    inputs = [run.own(part, rows) for part, rows in enumerate(splits[run.rank])]
    dist.all_to_all(outputs, inputs, group=run.group)
    return outputs


@on_gloo("all_to_all")
def _exchange_as_one(run: Run) -> list[Tensor]:
    """gloo's own takes parts of one size only."""
    splits = run.splits()
    taken = [splits[sender][run.rank] for sender in range(run.size)]
    output = run.room(sum(taken))
    given = torch.cat([run.own(part, rows) for part, rows in enumerate(splits[run.rank])])
    dist.all_to_all_single(output, given, taken, splits[run.rank], group=run.group)
    return list(output.split_with_sizes(taken))


@operation
def all_to_all_single(run: Run) -> list[Tensor]:
    each = run.case.elements // run.size
    output = run.room(run.size * each, rows=True)
    dist.all_to_all_single(output, run.own(0, run.size * each, rows=True), group=run.group)
    return [output]


@operation
def all_to_all_single_with_splits(run: Run) -> list[Tensor]:
    """Of rows of three elements."""
    splits = run.splits()
    taken = [splits[sender][run.rank] for sender in range(run.size)]
    given = splits[run.rank]
    output = run.room(3 * sum(taken), rows=True).view(-1, 3)
    dist.all_to_all_single(output, run.own(0, 3 * sum(given), rows=True).view(-1, 3), taken, given, group=run.group)
    return [output]


@operation
def barrier(run: Run) -> list[Tensor]:
    dist.barrier(run.group)
    return []


# -------------------------------------------------------------------- two by two


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


# -------------------------------------------------------------------- objects


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


# -------------------------------------------------------------------- functional


@operation
def functional_collectives(run: Run) -> list[Tensor]:
    group, op = run.group, run.case.reduction.lower()
    whole = run.own(0, run.size * 6).reshape(-1)
    results = [
        functional.all_reduce(whole, op, group),
        functional.all_gather_single(whole, 0, group),
        functional.reduce_scatter_single(whole, op, 0, group),
        functional.all_to_all_single(whole, None, None, group),
        functional.broadcast(whole, run.case.root, group),
        *functional.all_reduce_coalesced([whole, whole[:3]], op, group),
        *functional.all_gather_single_coalesced([whole, whole[:3].contiguous()], group),
        *functional.reduce_scatter_single_coalesced([whole, whole + whole], op, [0, 0], group),
    ]
    return [functional.wait_tensor(result).clone() for result in results]


@operation
def functional_gradients(run: Run) -> list[Tensor]:
    """Backward passes through the collectives."""
    weights = torch.arange(run.size * 4, dtype=torch.float64) + run.rank
    results = []
    for function in (
        lambda x: functional.all_gather_single_autograd(x, 0, run.group),
        lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, run.group),
        lambda x: functional.all_to_all_single_autograd(x, None, None, run.group),
    ):
        leaf = weights.clone().requires_grad_()
        output = function(leaf)
        (output * (1.0 + run.rank) * torch.arange(output.numel(), dtype=torch.float64)).sum().backward()
        assert leaf.grad is not None
        results += [output.detach().clone(), leaf.grad]
    return results
