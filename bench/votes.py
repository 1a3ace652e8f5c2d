"""What the ranks say to one another in a step, without a script, state or daemon: record to the buddy, vote, tail.

Every rank is a process with links of its own on this host. A figure is the median over all ranks and rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import click
import torch

from bench.collectives import DEADLINE_S, Events
from tmd.protocol.membership import Member, Membership
from tmd_worker.core.ballot import Ballot
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.wire import Kind

#: About what torch's, numpy's and Python's generators take, which are in every record.
RECORD_BYTES = 10_000
#: The first rounds pay for files, caches and readers that step aside.
SKIPPED_ROUNDS = 100


def vote_figures(ranks: int, rounds: int) -> dict[str, float]:
    """Wall and CPU time of one round in µs. Raises ClickException if a rank fails."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(ranks)
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        process = context.Process(target=_rank, args=(rank, ranks, rounds, together, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        members = dict(enumerate(_hear(pipe) for pipe in pipes))
        for pipe in pipes:
            pipe.send(members)
        results = [_hear(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(DEADLINE_S if all(other.is_alive() for other in processes) else 1.0)
            process.kill()
    spans = [span for spans, _ in results for span in spans]
    return {
        "round_us": round(statistics.median(spans), 1),
        "cpu_us_per_rank": round(statistics.mean(cpu_us for _, cpu_us in results), 1),
    }


def _hear(pipe: Connection) -> object:
    try:
        if pipe.poll(DEADLINE_S):
            return pipe.recv()
    except EOFError:
        pass
    raise click.ClickException("a rank of the vote's benchmark ended, or was silent; what it printed says why")


def _rank(rank: int, ranks: int, rounds: int, together: Barrier, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        fabric = Fabric(host="127.0.0.1", job_key=b"k" * 32, incarnation=f"votes-{rank}", events=Events())
        fabric.set_role(rank, ranks, 1)
        pipe.send(Member(incarnation=f"votes-{rank}", node="here", host=fabric.host, port=fabric.port))
        fabric.open(Membership(epoch=0, members=pipe.recv()), rank, DEADLINE_S)
        fabric.activate(0)
        ends, cpu_s = [], 0.0
        for step in range(SKIPPED_ROUNDS + rounds):
            _round(fabric, step)
            ends.append(time.perf_counter())
            if step == SKIPPED_ROUNDS:
                cpu_s = time.process_time()
        cpu_s = time.process_time() - cpu_s
        spans = [1e6 * (after - before) for before, after in zip(ends[SKIPPED_ROUNDS:], ends[SKIPPED_ROUNDS + 1 :], strict=False)]
        pipe.send((spans, 1e6 * cpu_s / len(spans)))
        together.wait(DEADLINE_S)
        fabric.close_all()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _round(fabric: Fabric, step: int) -> None:
    fabric.buddy.send(Kind.RECORD, step, bytes(RECORD_BYTES))
    if not fabric.buddy.wait_for(step, DEADLINE_S) or fabric.vote(Ballot.single(epoch=0, step=step), DEADLINE_S)[0] is None:
        raise RuntimeError(f"the vote on step {step} broke")
    fabric.buddy.send(Kind.TAIL, step, b"")
