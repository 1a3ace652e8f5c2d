"""The part of the handoff benchmark with several sources: what a second source and four joiners at once change.

Four sources and four joiners, each a process with the bytes of one state. In turn, for each round:
- "one": a joiner reads from one source;
- "two": the same joiner reads from two, which share the chunks out;
- "four": every joiner reads from a source of its own, all at once.
`two_ratio` is one's time over two's; `four_ratio` the bytes of all four over their time, against one's. 1 is no gain. Digests are
off.

Under two conditions: "loopback", where all of them share the processors of this machine, and "paced", where the kernel paces each
source's connections to PACE_MIB_S in all (SO_MAX_PACING_RATE), as a network would that is the bottleneck on the source's side.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click
import numpy as np

from tmd_worker import offspring
from tmd_worker.handoff.agreement import Agreement
from tmd_worker.handoff.pulling import Puller
from tmd_worker.handoff.tcp import STREAMS, Tcp
from tmd_worker.handoff.transfer import Memory, Region, SharedChunks, TransferFailed, split

MIB = 1 << 20
TIMEOUT_S = 600.0
CONDITIONS = ("loopback", "paced")
PACE_MIB_S = 64
JOINERS = 4
#: Of asm-generic/socket.h; Python has no name for it.
SO_MAX_PACING_RATE = 47
_TOKEN_BYTES = 16


def measure(size_bytes: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds; the first of all warms up and does not count."""
    result: dict[str, Any] = {"bytes": size_bytes, "rounds": rounds, "pace_mib_s": PACE_MIB_S}
    with contextlib.ExitStack() as ending:
        sources = [ending.enter_context(contextlib.closing(_Process(_source, size_bytes))) for _ in range(JOINERS)]
        offers = [source.hear() for source in sources]
        joiners = []
        for number in range(JOINERS):
            own, other = offers[number], offers[(number + 1) % JOINERS]
            # As the other one's second joiner.
            ends = {condition: [(own[0], own[1][condition][0]), (other[0], other[1][condition][1])] for condition in CONDITIONS}
            joiners.append(ending.enter_context(contextlib.closing(_Process(_joiner, size_bytes, ends))))
        for joiner in joiners:
            joiner.hear()
        for condition in CONDITIONS:
            times = _times(joiners, condition, rounds)
            result[condition] = {
                "one_mib_s": round(size_bytes / MIB / statistics.median(times["one"]), 1),
                "two_ratio": _ratio(times["one"], times["two"], 1),
                "four_ratio": _ratio(times["one"], times["four"], JOINERS),
            }
    return result


def _times(joiners: list[_Process], condition: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"one": [], "two": [], "four": []}
    for number in range(-1, rounds):
        for who in times if number % 2 else reversed(times):
            began_s = time.perf_counter()
            active = joiners if who == "four" else joiners[:1]
            for joiner in active:
                joiner.say((condition, 2 if who == "two" else 1))
            for joiner in active:
                joiner.hear()
            if number >= 0:
                times[who].append(time.perf_counter() - began_s)
    return times


def _ratio(ones_s: list[float], others_s: list[float], states: int) -> float:
    return round(statistics.median(states * one / other for one, other in zip(ones_s, others_s, strict=True)), 2)


class _Process:
    """Ends with this one at the latest."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, os.getpid(), *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def say(self, words: Any) -> None:
        self._pipe.send(words)

    def hear(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise click.ClickException(f"a process of the benchmark said nothing for {TIMEOUT_S:.0f} s")
        try:
            words = self._pipe.recv()
        except EOFError as error:
            raise click.ClickException("a process of the benchmark has ended") from error
        if isinstance(words, TransferFailed):
            raise click.ClickException(f"a transfer failed: {words}")
        return words

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _source(pipe: Connection, parent_pid: int, size_bytes: int) -> None:
    """Says its port and, for each condition, the answers to its two joiners."""
    offspring.end_with_parent(parent_pid)
    held = np.ones(size_bytes, np.uint8)
    tcp = Tcp()
    paced: list[bytes] = []
    answers: dict[str, list[bytes]] = {}
    for condition in CONDITIONS:
        ends = [tcp.source() for _ in range(2)]
        answers[condition] = [end.accept(b"", TIMEOUT_S) for end in ends]
        for end in ends:
            end.export([Memory(held.ctypes.data, size_bytes)])
        paced += answers[condition] if condition == "paced" else []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((listener.getsockname()[1], answers))
        while True:
            sock, _ = listener.accept()
            token = sock.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if any(token in answer for answer in paced):
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, PACE_MIB_S * MIB // STREAMS)
            threading.Thread(target=tcp.serve, args=(sock, {"token": token}), daemon=True).start()


def _joiner(pipe: Connection, parent_pid: int, size_bytes: int, sources: dict[str, list[tuple[int, bytes]]]) -> None:
    """`sources`: for each condition, port and answer of its own source and of another one. Reads when it is told."""
    offspring.end_with_parent(parent_pid)
    held = np.ones(size_bytes, np.uint8)
    memory = [Memory(held.ctypes.data, size_bytes)]
    agreements: dict[str, list[Agreement]] = {}
    for condition, ends in sources.items():
        agreements[condition] = []
        for port, answer in ends:
            end = Tcp().joiner(functools.partial(_dial, port))
            end.connect(answer, TIMEOUT_S)
            agreements[condition].append(Agreement("tcp", "", end, end, "tcp", b""))
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            condition, count = pipe.recv()
            pipe.send(_read(agreements[condition][:count], memory))


def _read(agreements: list[Agreement], memory: list[Memory]) -> TransferFailed | None:
    """What went wrong."""
    shared = SharedChunks(split([part.size_bytes for part in memory]))
    failed: list[TransferFailed] = []

    def move(agreement: Agreement) -> None:
        exports = {"tcp": [Region(0, part.size_bytes, entry) for entry, part in enumerate(memory)]}
        try:
            Puller(agreement, exports, memory, lambda _: None, TIMEOUT_S).move(shared)
        except TransferFailed as error:
            failed.append(error)

    threads = [threading.Thread(target=move, args=(agreement,)) for agreement in agreements]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return failed[0] if failed else None


def _dial(port: int, fields: dict[str, Any], timeout_s: float) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout_s)
    sock.sendall(fields["token"])
    return sock
