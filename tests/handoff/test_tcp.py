"""Bytes read over real connections arrive where they belong, or the reader says why they do not and gives the rest back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.handoff.memory import Buffers
from tests.handoff.rig import DEADLINE_S, Pair, connected, dial_port
from tests.handoff.source_program import contents
from tmd_worker.handoff.tcp import Tcp, TcpJoiner, _ask
from tmd_worker.handoff.transfer import CHUNK_BYTES, Chunk, Region, TransferFailed, Work, split

ROOT = Path(__file__).resolve().parents[2]


def some(*sizes: int) -> list[bytes]:
    generator = random.Random(5)
    return [generator.randbytes(size) for size in sizes]


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(some(), id="nothing at all"),
        pytest.param(some(0, 0), id="entries without bytes"),
        pytest.param(some(0, 1, 0, 7, 3 * CHUNK_BYTES + 5, 0, 1), id="tiny, large and empty"),
        pytest.param(some(*(number % 37 for number in range(1000))), id="a thousand tiny entries"),
        pytest.param(some(CHUNK_BYTES, 2 * CHUNK_BYTES), id="whole chunks"),
    ],
)
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_every_byte_arrives_where_it_belongs(entries: list[bytes], streams: int) -> None:
    with connected(entries, streams=streams) as pair:
        assert pair.read().missing == 0
        assert pair.joiner_memory.contents() == entries


def test_it_reads_what_is_in_memory_when_it_reads() -> None:
    """Nothing is copied before: the source's memory of the pause counts, and a second read sees what has changed."""
    with connected([b"before"]) as pair:
        pair.read()
        assert pair.joiner_memory.contents() == [b"before"]
        pair.source_memory = Buffers([b"after!"])
        pair.regions = pair.source.export(pair.source_memory.memory)
        pair.read()
        assert pair.joiner_memory.contents() == [b"after!"]


def test_nothing_can_be_read_that_is_not_exported() -> None:
    with connected(some(100)) as pair:
        wanted = [Buffers.empty([100]).memory[0], Buffers.empty([50]).memory[0]]
        pair.regions = (*pair.regions, Region(0, 50, 1))
        work = Work(split([100, 50]))
        with pytest.raises(TransferFailed, match="the source refused: 50 bytes at 0 of entry 1 are not exported"):
            pair.joiner.read(pair.regions, wanted, work, DEADLINE_S)
        assert work.missing == 1


def test_other_sizes_than_are_exported_are_refused_before_anything_is_read() -> None:
    with connected(some(100)) as pair:
        short = Buffers.empty([99])
        with pytest.raises(TransferFailed, match="other sizes"):
            pair.joiner.read(pair.regions, short.memory, Work(split([99])), DEADLINE_S)
        assert short.contents() == [bytes(99)]


def test_another_number_of_regions_than_is_to_be_read_is_refused() -> None:
    with connected(some(100, 7)) as pair, pytest.raises(TransferFailed, match="other sizes"):
        pair.joiner.read(pair.regions[:1], pair.joiner_memory.memory, Work(split([100, 7])), DEADLINE_S)


@pytest.mark.parametrize("fields", [{}, {"token": [1]}, {"token": "text"}, {"token": {"a": 1}}])
def test_a_connection_without_a_handoff_s_token_is_refused(fields: dict[str, object]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConnectionError, match="is over"):
        Tcp().serve(theirs, fields)


def test_nothing_reads_the_exported_memory_once_the_source_is_closed() -> None:
    """Also not a thread that is in the middle of sending to a joiner that takes nothing."""
    contents = [bytes(10 * CHUNK_BYTES)]
    with connected(contents, streams=2) as pair:
        for wire in pair.joiner._wires:
            for chunk in split([len(contents[0])]):
                _ask(wire, chunk.pieces, float("inf"))
        assert len(pair.source._wires) == 2
        pair.source.close()
        assert not pair.source._wires


def test_a_closed_source_serves_nobody_and_takes_no_new_connection() -> None:
    with contextlib.closing(Pair(some(100))) as pair:
        answer = pair.source.accept(b"", DEADLINE_S)
        pair.source.close()
        with pytest.raises(TransferFailed, match="no connection to the source's data"):
            pair.joiner.connect(answer, DEADLINE_S)


class Trickle:
    """Lets `whole_bytes` of one connection through and then nothing, without closing it."""

    def __init__(self, whole_bytes: int, connections: tuple[int, ...]) -> None:
        self._left_bytes = whole_bytes
        self._connections = connections
        self._kept: list[socket.socket] = []

    def __call__(self, number: int, sock: socket.socket) -> socket.socket:
        if number not in self._connections:
            return sock
        ours, theirs = socket.socketpair()
        self._kept += [sock, ours]
        for left, right, counted in ((sock, ours, True), (ours, sock, False)):
            threading.Thread(target=self._carry, args=(left, right, counted), daemon=True).start()
        return theirs

    def _carry(self, left: socket.socket, right: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := left.recv(1 << 16):
                if counted:
                    data = data[: self._left_bytes]
                    self._left_bytes -= len(data)
                right.sendall(data)

    def close(self) -> None:
        for sock in self._kept:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_a_peer_that_is_too_slow_ends_with_a_reason_and_what_it_had_is_given_back() -> None:
    entries = some(3 * CHUNK_BYTES)
    trickle = Trickle(CHUNK_BYTES + 10_000, (0,))
    with contextlib.closing(trickle), connected(entries, streams=1, between=trickle) as pair:
        work = Work(split([len(entries[0])]))
        with pytest.raises(TransferFailed, match=r"the peer sent too little in time: \d+ bytes of this chunk are missing"):
            pair.joiner.read(pair.regions, pair.joiner_memory.memory, work, 0.5)
        assert work.missing == 2
        with contextlib.closing(Pair(entries)) as other:
            other.connect()
            other.joiner.read(other.regions, pair.joiner_memory.memory, work, DEADLINE_S)
        assert work.missing == 0
        assert pair.joiner_memory.contents() == entries


def test_one_of_two_connections_that_stalls_leaves_its_chunks_to_the_other() -> None:
    entries = some(6 * CHUNK_BYTES)
    trickle = Trickle(10_000, (1,))
    with contextlib.closing(trickle), connected(entries, between=trickle) as pair:
        assert pair.read(timeout_s=1.0).missing == 0
        assert pair.joiner_memory.contents() == entries


def test_a_joiner_that_takes_nothing_does_not_hold_the_source() -> None:
    with connected([bytes(10 * CHUNK_BYTES)], streams=1) as pair:
        wire = pair.joiner._wires[0]
        pair.source._timeout_s = 0.5
        for chunk in split([10 * CHUNK_BYTES]):
            _ask(wire, chunk.pieces, float("inf"))
        for thread in pair._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_a_read_ends_when_the_end_is_closed_by_another_thread() -> None:
    entries = some(3 * CHUNK_BYTES)
    trickle = Trickle(CHUNK_BYTES, (0,))
    with contextlib.closing(trickle), connected(entries, streams=1, between=trickle) as pair:
        failures: list[TransferFailed] = []

        def read() -> None:
            with contextlib.suppress(AssertionError):
                try:
                    pair.read()
                except TransferFailed as error:
                    failures.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        pair.joiner.close()
        reading.join(DEADLINE_S)
        assert not reading.is_alive()
        assert failures


@pytest.fixture
def program() -> Iterator[tuple[subprocess.Popen[str], TcpJoiner]]:
    """A source that is a process of its own with two entries, and a joiner's end that is connected to it."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}"}
    command = [sys.executable, "-m", "tests.handoff.source_program", str(os.getpid()), "5", *map(str, SIZES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            joiner = Tcp().joiner(dial_port(told["port"]))
            with contextlib.closing(joiner):
                joiner.connect(bytes.fromhex(told["answers"][0]), DEADLINE_S)
                yield process, joiner
        finally:
            process.kill()


SIZES = [10 * CHUNK_BYTES + 3, 17]


def test_a_source_that_is_killed_in_the_middle_leaves_the_rest_to_another(
    program: tuple[subprocess.Popen[str], TcpJoiner],
) -> None:
    process, joiner = program
    landed: list[Chunk] = []

    def kill_after_two(chunk: Chunk) -> None:
        landed.append(chunk)
        if len(landed) == 2:
            process.kill()
            process.wait(DEADLINE_S)

    memory = Buffers.empty(SIZES)
    work = Work(split(SIZES), kill_after_two)
    regions = [Region(0, size, entry) for entry, size in enumerate(SIZES)]
    with pytest.raises(TransferFailed, match=r"closed the connection|reset by peer|Broken pipe"):
        joiner.read(regions, memory.memory, work, DEADLINE_S)
    assert 2 <= len(landed) < len(split(SIZES))
    assert work.missing == len(split(SIZES)) - len(landed)
    with connected(contents(5, SIZES)) as other:
        other.joiner.read(other.regions, memory.memory, work, DEADLINE_S)
    assert sorted(chunk.number for chunk in landed) == list(range(len(split(SIZES))))
    assert memory.contents() == contents(5, SIZES)
