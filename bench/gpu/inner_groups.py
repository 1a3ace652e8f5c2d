"""A member of an inner group is replaced while the others go on: NCCL on real devices, or the same on the CPU with gloo.

    python -m bench.gpu.inner_groups --transport nccl --members 4 --moves 5
    python -m bench.gpu.inner_groups --transport gloo --members 4 --moves 5

Every move: a new process and the stayers make the new group in the background while the old one keeps adding; it is switched to
between two sums, and the old one is given back. In the end one member is killed in the middle of a sum. NCCL needs one GPU for
each member and one more for the joiner. Prints one JSON object; every sum is checked, a wrong one ends it with an error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import click
import torch

from tmd.protocol.control import TransportName
from tmd.protocol.membership import Member, Membership, Plan
from tmd_worker import offspring
from tmd_worker.core.rank import Admission
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.inner import InnerBroken, InnerGroup
from tmd_worker.transport.shell import TmdProcessGroup
from tmd_worker.transport.tensors import Reduction

JOB_KEY = b"measured" * 4
DEADLINE_S = 120.0
ELEMENTS = 1 << 20


class Events:
    """As in a rank: a broken link ends its epoch."""

    def __init__(self) -> None:
        self.fabric: Fabric

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        self.fabric.close(epoch, reason)

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        return Admission.PROCEED

    def thread_died(self, error: BaseException) -> None:
        print(f"a thread died: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


class Worker:
    """One process: adds whenever it is told to, and makes the next group beside that."""

    def __init__(self, pipe: Connection, transport: TransportName, number: int, rank: int, members: int) -> None:
        self._pipe = pipe
        self._members = members
        self._rank = rank
        if transport == "nccl":
            torch.cuda.set_device(number % torch.cuda.device_count())
            self._device = torch.device("cuda", torch.cuda.current_device())
        else:
            self._device = torch.device("cpu")
        events = Events()
        self._fabric = events.fabric = Fabric(
            host="127.0.0.1", job_key=JOB_KEY, incarnation=f"p{number}", events=events, transport=transport
        )
        self._fabric.set_role(rank, members, 1)
        self._world = TmdProcessGroup(self._fabric, rank, tuple(range(members)), DEADLINE_S)
        self._world._set_group_name("world")
        self._staging: threading.Thread | None = None
        pipe.send(Member(incarnation=f"p{number}", node=f"p{number}", host=self._fabric.host, port=self._fabric.port))

    def run(self) -> None:
        """Answers every order of the parent with one message."""
        while True:
            name, *arguments = self._pipe.recv()
            self._pipe.send(getattr(self, name)(*arguments))

    def open(self, table: Membership) -> None:
        self._fabric.open(table, self._rank, DEADLINE_S)
        self._fabric.activate(table.epoch)

    def stage(self, plan: Plan) -> None:
        """In the background."""
        self.staged_s = 0.0
        began_s = time.monotonic()

        def body() -> None:
            self._fabric.stage(plan, self._rank, DEADLINE_S)
            self.staged_s = time.monotonic() - began_s

        self._staging = threading.Thread(target=body, daemon=True)
        self._staging.start()

    def staged(self) -> float:
        """How long it took in seconds, or 0 while it is under way."""
        return self.staged_s

    def switch(self, plan: Plan, epoch: int) -> float:
        """Returns seconds."""
        began_s = time.monotonic()
        if self._inner() is None:
            self._fabric.activate(epoch)
        else:
            self._fabric.switch(plan, epoch)
        return time.monotonic() - began_s

    def retire(self, epoch: int) -> None:
        self._fabric.retire(epoch)

    def add(self) -> float:
        """One sum over all members; returns seconds. Raises AssertionError for a wrong one."""
        tensor = torch.full((ELEMENTS,), float(self._rank + 1), device=self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began_s = time.monotonic()
        inner = self._inner()
        assert inner is not None
        inner.allreduce(tensor, Reduction.SUM)
        assert float(tensor[0]) == float(tensor[-1]) == self._members * (self._members + 1) / 2, tensor
        return time.monotonic() - began_s

    def add_until_it_breaks(self) -> float:
        """Returns when that was, by time.monotonic()."""
        try:
            while True:
                self.add()
        except InnerBroken:
            return time.monotonic()

    def _inner(self) -> InnerGroup | None:
        table = self._world._group.table
        return table.inner if table is not None else None


def worker(pipe: Connection, transport: TransportName, number: int, rank: int, members: int, parent_pid: int) -> None:
    offspring.end_with_parent(parent_pid)
    torch.set_num_threads(1)
    try:
        Worker(pipe, transport, number, rank, members).run()
    except EOFError:
        pass  # the parent has ended


class Process:
    """The parent's end of a worker."""

    def __init__(self, transport: TransportName, number: int, rank: int, members: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs, transport, number, rank, members, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.rank = rank
        self.member: Member = self.answer()

    def ask(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, *arguments))

    def answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"the process with rank {self.rank} said nothing for {DEADLINE_S:.0f} s")
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


def all_of(processes: list[Process], name: str, *arguments: Any) -> list[Any]:
    for process in processes:
        process.ask(name, *arguments)
    return [process.answer() for process in processes]


class Measurement:
    """The parent."""

    def __init__(self, transport: TransportName, members: int) -> None:
        self._transport = transport
        self._started = [Process(transport, rank, rank, members) for rank in range(members)]
        self.members = list(self._started)
        self._table = Membership(epoch=0, members={process.rank: process.member for process in self.members})
        all_of(self.members, "open", self._table)
        self.figures: dict[str, list[float]] = {"alone_ms": [], "beside_ms": [], "make_ms": [], "switch_ms": []}

    def move(self, rank: int) -> None:
        """The process with this rank is replaced by a new one."""
        joiner = Process(self._transport, len(self._started), rank, len(self.members))
        self._started.append(joiner)
        leaver = self.members[rank]
        epoch = self._table.epoch + 1
        successor = Membership(epoch=epoch, members={**self._table.members, rank: joiner.member})
        plan = Plan(
            plan_id=epoch,
            migration_id=f"m{epoch}",
            base_epoch=self._table.epoch,
            leavers={rank: leaver.member.incarnation},
            successor=successor,
        )
        stayers = [process for process in self.members if process is not leaver]
        self._add("alone_ms")
        all_of([joiner, *stayers], "stage", plan)
        while not all(all_of([joiner, *stayers], "staged")):
            self._add("beside_ms")
        self.figures["make_ms"].append(1000 * max(all_of([joiner, *stayers], "staged")))
        self.figures["switch_ms"].append(1000 * max(all_of([joiner, *stayers], "switch", plan, epoch)))
        self.members[rank] = joiner
        self._table = successor
        self._add("alone_ms")
        all_of(stayers, "retire", epoch)
        leaver.kill()

    def kill(self, rank: int) -> float:
        """Milliseconds until the last survivor's sum has ended."""
        for process in self.members:
            process.ask("add_until_it_breaks")
        time.sleep(0.2)  # so that they are in the middle of it
        began_s = time.monotonic()
        self.members[rank].kill()
        survivors = [process for process in self.members if process.rank != rank]
        return 1000 * (max(process.answer() for process in survivors) - began_s)

    def _add(self, figure: str) -> None:
        self.figures[figure].append(1000 * max(all_of(self.members, "add")))

    def end(self) -> None:
        for process in self._started:
            process.kill()


@click.command()
@click.option("--transport", type=click.Choice(["nccl", "gloo"]), required=True)
@click.option("--members", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--moves", type=click.IntRange(min=1), default=5, show_default=True)
def main(transport: str, members: int, moves: int) -> None:
    """Replaces a member of an inner group, again and again, and kills one in the end."""
    devices = torch.cuda.device_count() if transport == "nccl" else 0
    if transport == "nccl" and devices <= members:
        raise click.UsageError(
            f"{members} members and a joiner need {members + 1} GPUs, this machine has {devices}; "
            "give fewer --members, or --transport gloo for the same on the CPU"
        )
    measurement = Measurement(cast(TransportName, transport), members)
    try:
        for number in range(moves):
            measurement.move(1 + number % (members - 1))
        ended_ms = measurement.kill(members - 1)
    finally:
        measurement.end()
    medians = {name: round(statistics.median(values), 2) for name, values in measurement.figures.items() if values}
    what = torch.cuda.get_device_name() if transport == "nccl" else f"{os.cpu_count()} CPUs"
    print(json.dumps({"transport": transport, "on": what, "members": members, "moves": moves, "mib": ELEMENTS * 4 >> 20,
                      **medians, "kill_to_end_ms": round(ended_ms, 2)}))  # fmt: skip


if __name__ == "__main__":
    main()
