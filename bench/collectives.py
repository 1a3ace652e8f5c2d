"""Collectives of the `delta` transport against gloo's, in the same processes, in turn: every operation, size and kind of link.

    python -m bench.collectives --ranks 2 --ranks 4 --ranks 8 --rounds 7

A round runs each of the contestants a few times in a row; the order turns around from round to round. A round's time is that of
the slowest rank for one call; the figures are medians over the rounds. CPU time is that of all ranks together. `bytes` is the
size of what every rank ends with (all-reduce, broadcast, all-gather, all-to-all) or brings (reduce, reduce-scatter), of what the
root ends with (gather) or brings (scatter), and of each message (send/recv, in which every rank sends to the next one and
receives from the one before). Writes OUT, a list of
{op, ranks, bytes, link, delta_ms, gloo_ms, ratio, delta_cpu_ms, gloo_cpu_ms}, ratio = gloo_ms / delta_ms, and a table beside it.
`link`: "tcp" (loopback device), "unix" (sockets within the host) or "shm" (memory); gloo always uses TCP.

Small sizes on a machine with fewer cores than ranks flatter tmd: gloo's threads spin there. Do not take those ratios elsewhere.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from tmd.protocol.membership import Member, Membership
from tmd_worker import offspring
from tmd_worker.core.rank import Admission
from tmd_worker.native import library
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.ports import LOCAL_LINKS
from tmd_worker.transport.shell import TmdProcessGroup

OUT = Path("out/bench/collectives.json")
KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
OPERATIONS = (
    "allreduce",
    "allgather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "sendrecv",
    "barrier",
)
LINKS = ("tcp", "unix", "shm")
#: A round moves about this much, so that short calls are many.
ROUND_BYTES = 2 * MIB
MAX_CALLS = 20
DEADLINE_S = 300.0

#: (wall seconds, CPU seconds) of one call.
Sample = tuple[float, float]


class Events:
    """A bench in which a link breaks is worth nothing."""

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        if not orderly:
            print(f"a link to rank {peer} broke: {reason}", file=sys.stderr, flush=True)

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        return Admission.PROCEED

    def thread_died(self, error: BaseException) -> None:
        traceback.print_exception(error)
        os._exit(1)


@click.command()
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/bench/collectives.json"), show_default=True
)
@click.option("--ranks", type=click.IntRange(min=2), multiple=True, default=(2, 4, 8), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--op", "operations", type=click.Choice(OPERATIONS), multiple=True, default=OPERATIONS, show_default=True)
@click.option("--link", "links", type=click.Choice(LINKS), multiple=True, default=LINKS, show_default=True)
@click.option("--max-bytes", type=click.IntRange(min=KIB), default=SIZES[-1], show_default=True)
def main(
    out: Path, ranks: tuple[int, ...], rounds: int, operations: tuple[str, ...], links: tuple[str, ...], max_bytes: int
) -> None:
    """Times collectives of tmd and of gloo side by side."""
    conditions = (
        f"load {os.getloadavg()[0]:.1f} when it began, {os.cpu_count()} CPUs, {rounds} rounds, {library.core().description}"
    )
    print(conditions, file=sys.stderr)
    sizes = [size for size in SIZES if size <= max_bytes]
    rows: list[dict[str, Any]] = []
    for size in ranks:
        rows += _run(size, rounds, operations, links, sizes)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
    table = out.with_suffix(".md")
    table.write_text(f"{conditions} and {os.getloadavg()[0]:.1f} after\n\n{_table(rows)}")
    print(table.read_text())


# -------------------------------------------------------------------- the parent


def _run(size: int, rounds: int, operations: tuple[str, ...], links: tuple[str, ...], sizes: list[int]) -> list[dict[str, Any]]:
    """One set of processes, all cells."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(size)
    pipes, children = [], []
    port = context.Value("i", 0)
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, rounds, operations, links, sizes, together, theirs, port, os.getpid())
            child = context.Process(target=_rank, args=arguments, daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        members = [_hear(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send([{rank: member[link] for rank, member in enumerate(members)} for link in range(len(links))])
        rows = []
        for operation, size_bytes in _cells(operations, sizes):
            samples = [_hear(pipe) for pipe in pipes]
            rows += _rows(operation, size, size_bytes, links, samples)
            ratios = "  ".join(f"{row['link']} {row['ratio']:.2f}" for row in rows[-len(links) :])
            print(f"{operation}, {size} ranks, {_in_words(size_bytes)}: {ratios}", file=sys.stderr, flush=True)
        return rows
    finally:
        for child in children:
            child.kill()
            child.join()


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise click.ClickException(f"a rank said nothing for {DEADLINE_S:.0f} s")
    return pipe.recv()


def _cells(operations: tuple[str, ...], sizes: list[int]) -> list[tuple[str, int]]:
    return [(operation, size) for operation in operations for size in (sizes if operation != "barrier" else [0])]


def _rows(
    operation: str, ranks: int, size_bytes: int, links: tuple[str, ...], samples: list[dict[str, list[Sample]]]
) -> list[dict[str, Any]]:
    """`samples`: by rank, contestant and round."""

    def medians_ms(who: str) -> tuple[float, float]:
        by_round = list(zip(*(of_rank[who] for of_rank in samples), strict=True))
        wall_s = statistics.median(max(wall_s for wall_s, _ in of_ranks) for of_ranks in by_round)
        cpu_s = statistics.median(sum(cpu_s for _, cpu_s in of_ranks) for of_ranks in by_round)
        return 1000 * wall_s, 1000 * cpu_s

    gloo_ms, gloo_cpu_ms = medians_ms("gloo")
    rows = []
    for link in links:
        delta_ms, delta_cpu_ms = medians_ms(link)
        rows.append(
            {
                "op": operation,
                "ranks": ranks,
                "bytes": size_bytes,
                "link": link,
                "delta_ms": round(delta_ms, 4),
                "gloo_ms": round(gloo_ms, 4),
                "ratio": round(gloo_ms / delta_ms, 3),
                "delta_cpu_ms": round(delta_cpu_ms, 4),
                "gloo_cpu_ms": round(gloo_cpu_ms, 4),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    """A column for each size: gloo's milliseconds, then ratios of wall time and, in parentheses, of CPU time."""
    sizes = sorted({row["bytes"] for row in rows if row["bytes"]})
    lines = ["| operation | ranks | | " + " | ".join(map(_in_words, sizes)) + " |", "|---|---|---|" + "---|" * len(sizes)]
    groups: dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["ranks"]), {}).setdefault(row["link"], {})[row["bytes"]] = row
    for (operation, ranks), by_link in groups.items():
        any_link = next(iter(by_link.values()))
        columns = [0] if 0 in any_link else sizes
        gloo_ms = [f"{any_link[size]['gloo_ms']:.3g}" for size in columns]
        lines.append(f"| {operation} | {ranks} | gloo, ms | " + " | ".join(gloo_ms) + " |")
        for link, by_size in by_link.items():
            lines.append(f"| | | {link} | " + " | ".join(_ratios(by_size[size]) for size in columns) + " |")
    return "\n".join(lines) + "\n"


def _ratios(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['gloo_cpu_ms'] / row['delta_cpu_ms']:.2f})"


def _in_words(size_bytes: int) -> str:
    if not size_bytes:
        return "–"
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"


# -------------------------------------------------------------------- a rank


def _rank(
    rank: int,
    size: int,
    rounds: int,
    operations: tuple[str, ...],
    links: tuple[str, ...],
    sizes: list[int],
    together: Barrier,
    pipe: Connection,
    port: Any,
    parent_pid: int,
) -> None:
    offspring.end_with_parent(parent_pid)
    torch.set_num_threads(1)
    try:
        fabrics = [_fabric(rank, size, link) for link in links]
        pipe.send(
            [Member(incarnation=f"{link}-{rank}", node="here", host=fabric.host, port=fabric.port) for link, fabric in fabrics]
        )
        groups: dict[str, Any] = {"gloo": _gloo(rank, size, together, port)}
        for (link, fabric), members in zip(fabrics, pipe.recv(), strict=True):
            groups[link] = _live_group(fabric, rank, size, link, Membership(epoch=0, members=members))
        for operation, size_bytes in _cells(operations, sizes):
            pipe.send(_measure(groups, operation, size, size_bytes, rounds, together))
        together.wait(DEADLINE_S)
        for _, fabric in fabrics:
            fabric.close_all()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _fabric(rank: int, size: int, link: str) -> tuple[str, Fabric]:
    os.environ[LOCAL_LINKS] = link
    fabric = Fabric(host="127.0.0.1", job_key=b"k" * 32, incarnation=f"{link}-{rank}", events=Events())
    fabric.set_role(rank, size, 1)
    return link, fabric


def _live_group(fabric: Fabric, rank: int, size: int, link: str, membership: Membership) -> TmdProcessGroup:
    group = TmdProcessGroup(fabric, rank, tuple(range(size)), DEADLINE_S)
    group._set_group_name(link)
    fabric.open(membership, rank, DEADLINE_S)
    fabric.activate(0)
    return group


def _gloo(rank: int, size: int, together: Barrier, port: Any) -> dist.ProcessGroupGloo:
    """Rank 0's store is on a free port, which it tells the others."""
    patience = datetime.timedelta(seconds=DEADLINE_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, patience, wait_for_workers=False)
        port.value = store.port
    together.wait(DEADLINE_S)
    if rank:
        store = dist.TCPStore("127.0.0.1", port.value, size, False, patience, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)


def _measure(
    groups: dict[str, Any], operation: str, size: int, size_bytes: int, rounds: int, together: Barrier
) -> dict[str, list[Sample]]:
    """By contestant, a sample for each round."""
    calls = max(1, min(MAX_CALLS, ROUND_BYTES // max(size_bytes, 1)))
    contestants = {who: _call(group, operation, size, size_bytes) for who, group in groups.items()}
    samples: dict[str, list[Sample]] = {who: [] for who in contestants}
    for number in range(-1, rounds):
        order = list(contestants) if number % 2 else list(reversed(contestants))
        for who in order:
            call = contestants[who]
            together.wait(DEADLINE_S)
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            wall_s = time.perf_counter() - wall_s
            together.wait(DEADLINE_S)
            if number >= 0:  # the first round warms up
                samples[who].append((wall_s / calls, (time.process_time() - cpu_s) / calls))
    return samples


def _call(group: Any, operation: str, size: int, size_bytes: int) -> Callable[[], Any]:
    """As torch.distributed's functions make it without `async_op`."""
    whole = torch.zeros(max(size, size_bytes // 4 // size * size))
    part = torch.zeros(whole.numel() // size)
    if operation == "allreduce":
        summing = waited_for(dist.AllreduceOptions())
        return lambda: group.allreduce([whole], summing).wait()
    if operation == "allgather":
        gathering = waited_for(AllgatherOptions())
        return lambda: group._allgather_base(whole, part, gathering).wait()
    if operation == "reduce_scatter":
        scattering = waited_for(dist.ReduceScatterOptions())
        return lambda: group._reduce_scatter_base(part, whole, scattering).wait()
    if operation == "alltoall":
        exchanging = waited_for(dist.AllToAllOptions())
        result = torch.zeros_like(whole)
        return lambda: group.alltoall_base(result, whole, [], [], exchanging).wait()
    if operation == "sendrecv":
        return _message(group, size, whole)
    if operation == "barrier":
        meeting = waited_for(dist.BarrierOptions())
        return lambda: group.barrier(meeting).wait()
    return _rooted_call(group, operation, whole, part)


def _rooted_call(group: Any, operation: str, whole: Tensor, part: Tensor) -> Callable[[], Any]:
    """Rank 0 is the root."""
    blocks = [list(whole.view(-1, part.numel()).unbind(0))] if group.rank() == 0 else []
    if operation == "broadcast":
        sending = waited_for(dist.BroadcastOptions())
        sending.rootRank = sending.rootTensor = 0
        return lambda: group.broadcast([whole], sending).wait()
    if operation == "reduce":
        summing = waited_for(dist.ReduceOptions())
        summing.rootRank = summing.rootTensor = 0
        return lambda: group.reduce([whole], summing).wait()
    if operation == "gather":
        gathering = waited_for(dist.GatherOptions())
        gathering.rootRank = 0
        return lambda: group.gather(blocks, [part], gathering).wait()
    handing_out = waited_for(dist.ScatterOptions())
    handing_out.rootRank = 0
    return lambda: group.scatter([part], blocks, handing_out).wait()


def _message(group: Any, size: int, whole: Tensor) -> Callable[[], Any]:
    """As batch_isend_irecv makes it."""
    following, previous = (group.rank() + 1) % size, (group.rank() - 1) % size
    room = torch.zeros_like(whole)

    def pass_on() -> None:
        works = [group.send([whole], following, 0), group.recv([room], previous, 0)]
        for work in works:
            work.wait()

    return pass_on


def waited_for(options: Any) -> Any:
    options.asyncOp = False
    return options


if __name__ == "__main__":
    main()
