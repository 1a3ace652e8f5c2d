"""How fast a state moves, and what a full-copy migration stops for.

    python -m bench.handoff --transfer-mib 1024 --rounds 7 --size 5:4 --size 50:4 --size 200:2

Three parts, written to OUT:
- "transfer": the same bytes between two processes over loopback TCP, in turn: "raw" (two connections, sendall and recv_into of
  all that is there), "tcp" (the handoff's transport, digests off) and "tcp_digest" (both ends compute digests). Ratios are those
  of raw's time over the contestant's of the same round; the figures are medians over the rounds.
- "sources": a second source for one joiner, and four joiners at once; see handoff_sources.py.
- "migrations": a job of so many million parameters and ranks, one node each, of which one is migrated; its downtime, what
  the steps around it lost besides (the standby prepares beside them), phases, and the parts of the joiner's handoff as they are
  stored with the migration.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench import handoff_sources
from tmd.demo.ending import end_as_on_ctrl_c
from tmd.demo.stack import Stack
from tmd_worker import offspring
from tmd_worker.handoff.digests import Digests
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import Memory, Region, Work, split

MIB = 1 << 20
STREAMS = 2
TIMEOUT_S = 600.0
CONTESTANTS = ("raw", "tcp", "tcp_digest")
#: Of wide_job.py, which is not imported: torch is not needed here.
WIDTH = 1024
PARAMETERS_PER_LAYER = WIDTH * WIDTH + WIDTH
_TOKEN_BYTES = 16


class Size(click.ParamType):
    """PARAMETERS:RANKS, millions of parameters."""

    name = "PARAMETERS:RANKS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parameters, _, ranks = value.partition(":")
        if not (parameters.isdecimal() and ranks.isdecimal() and int(parameters) > 0 and int(ranks) > 1):
            self.fail(f"{value!r} is not understood; say millions of parameters and at least 2 ranks, as 50:4", param, ctx)
        return int(parameters), int(ranks)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/bench/handoff.json"), show_default=True)
@click.option("--transfer-mib", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--sources-mib", type=click.IntRange(min=1), default=128, show_default=True, help="Of each source and joiner.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option(
    "--size", "sizes", type=Size(), multiple=True, default=((5, 4), (50, 4), (200, 2)), help="May be given several times."
)
@click.option("--no-migrations", is_flag=True, help="The transfers alone.")
def main(
    out: Path, transfer_mib: int, sources_mib: int, rounds: int, sizes: tuple[tuple[int, int], ...], no_migrations: bool
) -> None:
    """Times transfers against a raw copy, and full-copy migrations in parts."""
    end_as_on_ctrl_c()
    results: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    results["transfer"] = _transfer(transfer_mib * MIB, rounds)
    _write(out, results)
    results["sources"] = handoff_sources.measure(sources_mib * MIB, rounds)
    _write(out, results)
    results["migrations"] = []
    for parameters, ranks in () if no_migrations else sizes:
        results["migrations"].append(_migration(out.with_suffix("") / f"{parameters}m-{ranks}", parameters, ranks))
        _write(out, results)
    results["load_after"] = round(os.getloadavg()[0], 1)
    _write(out, results)
    print(json.dumps(results, indent=1))


def _write(out: Path, results: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -------------------------------------------------------------------- the transfer


def _transfer(size_bytes: int, rounds: int) -> dict[str, Any]:
    """The source is another process; both hold the bytes in memory that was touched."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_source, args=(size_bytes, theirs, os.getpid()), daemon=True)
    child.start()
    theirs.close()
    with contextlib.ExitStack() as ending:
        ending.callback(child.join)
        ending.callback(child.kill)
        ending.callback(ours.close)
        reader = _Reader(size_bytes, ours)
        ending.callback(reader.close)
        times: dict[str, list[float]] = {who: [] for who in CONTESTANTS}
        for number in range(-1, rounds):
            for who in CONTESTANTS if number % 2 else reversed(CONTESTANTS):
                seconds = reader.time(who)
                if number >= 0:  # the first round warms up
                    times[who].append(seconds)
            say(f"transfer, round {number + 1}/{rounds}")
    result: dict[str, Any] = {"bytes": size_bytes, "rounds": rounds, "streams": STREAMS}
    for who in CONTESTANTS:
        result[f"{who}_mib_s"] = round(size_bytes / MIB / statistics.median(times[who]), 1)
    for who in CONTESTANTS[1:]:
        result[f"{who}_ratio"] = round(statistics.median(r / t for r, t in zip(times["raw"], times[who], strict=True)), 3)
    return result


class _Reader:
    """The joiner's side."""

    def __init__(self, size_bytes: int, pipe: Connection) -> None:
        self._bytes = np.ones(size_bytes, np.uint8)
        self._memory = [Memory(self._bytes.ctypes.data, size_bytes)]
        self._chunks = split([size_bytes])
        self._pipe = pipe
        port, answer = self._hear()
        self._raw = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS)]
        for sock in self._raw:
            sock.sendall(bytes(_TOKEN_BYTES))
        self._joiner = Tcp(STREAMS).joiner(functools.partial(_dial, port))
        self._joiner.connect(answer, TIMEOUT_S)

    def close(self) -> None:
        for sock in self._raw:
            sock.close()
        self._joiner.close()

    def time(self, who: str) -> float:
        """Seconds from the word to go until the last byte is there and, with digests, compared."""
        began_s = time.perf_counter()
        self._pipe.send(who)
        if who == "raw":
            _all_at_once(
                [functools.partial(_receive, sock, part) for sock, part in zip(self._raw, _parts(self._bytes), strict=True)]
            )
        else:
            digests = Digests(self._memory, self._chunks)
            work = Work(self._chunks, digests.take) if who == "tcp_digest" else Work(self._chunks)
            self._joiner.read([Region(0, len(self._bytes), 0)], self._memory, work, TIMEOUT_S)
            if who == "tcp_digest" and digests.differing(self._hear())[0]:
                raise click.ClickException("bytes arrived damaged")
        seconds = time.perf_counter() - began_s
        if who != "tcp_digest":
            self._hear()
        return seconds

    def _hear(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise click.ClickException(f"the source said nothing for {TIMEOUT_S:.0f} s")
        return self._pipe.recv()


def _source(size_bytes: int, pipe: Connection, parent_pid: int) -> None:
    offspring.end_with_parent(parent_pid)
    held = np.ones(size_bytes, np.uint8)
    memory, chunks = [Memory(held.ctypes.data, size_bytes)], split([size_bytes])
    tcp = Tcp(STREAMS)
    source = tcp.source()
    raw: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((listener.getsockname()[1], source.accept(b"", TIMEOUT_S)))
        source.export(memory)
        for _ in range(2 * STREAMS):
            sock, _ = listener.accept()
            token = sock.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if any(token):
                threading.Thread(target=tcp.serve, args=(sock, {"token": token}), daemon=True).start()
            else:
                raw.append(sock)
    with contextlib.suppress(EOFError):
        while True:
            who = pipe.recv()
            if who == "raw":
                _all_at_once([functools.partial(sock.sendall, part) for sock, part in zip(raw, _parts(held), strict=True)])
            pipe.send(Digests(memory, chunks).take_all() if who == "tcp_digest" else None)


def _dial(port: int, fields: dict[str, Any], timeout_s: float) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout_s)
    sock.sendall(fields["token"])
    return sock


def _parts(held: Any) -> list[memoryview]:
    return [memoryview(part) for part in np.array_split(held, STREAMS)]


def _receive(sock: socket.socket, part: memoryview) -> None:
    while part:
        part = part[sock.recv_into(part) :]


def _all_at_once(bodies: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)


# -------------------------------------------------------------------- migrations


def _migration(folder: Path, millions: int, ranks: int) -> dict[str, Any]:
    layers = max(1, round(millions * 1e6 / PARAMETERS_PER_LAYER))
    script = Path(__file__).with_name("wide_job.py").resolve()
    with Stack(folder / "stack", nodes=ranks + 1) as stack:
        job_id = stack.submit(
            nnodes=ranks,
            standby=1,
            command=[str(script), "--layers", str(layers), "--width", str(WIDTH)],
            log_dir=str((folder / "logs").resolve()),
        )
        _until(lambda: _whole(stack, job_id), "the job to train and its standby to be ready")
        migration_id = stack.client.post("/v1/migrations", {"job": job_id, "rank": 0})["migration_id"]
        record = _until(lambda: _measured(stack, migration_id), "the migration's figures")
    (handoff,) = record["handoffs"].values()
    moved = sum(handoff["bytes_by_transport"].values())
    say(f"{millions}M parameters, {ranks} ranks: {moved / MIB / handoff['parts_s']['bytes']:.0f} MiB/s, {handoff['parts_s']}")
    return {
        "parameters": layers * PARAMETERS_PER_LAYER,
        "ranks": ranks,
        "bytes": moved,
        "transport": handoff["transport"],
        "bytes_mib_s": round(moved / MIB / handoff["parts_s"]["bytes"], 1),
        "parts_ms": {part: round(seconds * 1e3, 2) for part, seconds in handoff["parts_s"].items()},
        "phases_ms": {phase: round(seconds * 1e3, 2) for phase, seconds in record["phases_s"].items()},
        "downtime_ms": round(record["downtime_s"] * 1e3, 1),
        "besides_ms": round((record["lost_time_s"] - record["downtime_s"]) * 1e3, 1),
        "normal_step_ms": round(record["normal_step_s"] * 1e3, 1),
    }


def _whole(stack: Stack, job_id: str) -> bool | None:
    view = stack.job(job_id)
    if view is not None and view["record"]["state"] == "failed":
        raise click.ClickException(f"{job_id} failed: {view['record']['reason']}")
    trains = view is not None and view["record"]["state"] == "running" and view["normal_step_s"] is not None
    return True if trains and any(each["phase"] == "ready" for each in view["standbys"]) else None


def _measured(stack: Stack, migration_id: str) -> dict[str, Any] | None:
    record: dict[str, Any] = stack.client.get(f"/v1/migrations/{migration_id}")["record"]
    if record["state"] in ("aborted", "failed"):
        raise click.ClickException(f"{migration_id} is {record['state']}: {record['reason']}")
    return record if record["handoffs"] and record["lost_time_s"] is not None else None


def _until(answer: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + TIMEOUT_S
    while (value := answer()) is None:
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"waited {TIMEOUT_S:.0f} s in vain for {what}")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    main()
