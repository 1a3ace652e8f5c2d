"""A joiner's side of handoffs with the other host."""

from __future__ import annotations

import functools
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.rdma.guest.lines import SOURCES, Lines, dial
from tests.rdma.guest.tensors import Tensors
from tmd_worker.handoff.rdma import Rdma
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import Chunk, JoinerEnd, Region, TransferFailed, Work, split

CONNECT_TIMEOUT_S = 60.0
#: Of a chunk. This machine may be busy, and emulated.
CHUNK_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 60.0


class Source:
    """A process on the other host that holds tensors of these sizes."""

    def __init__(self, sizes: list[int], *, gap_bytes: int = 64, seed: int = 1) -> None:
        self._lines: Lines = dial(time.monotonic() + CONNECT_TIMEOUT_S)
        self.sizes = sizes
        self.pid = self.ask("hold", sizes=sizes, gap_bytes=gap_bytes, seed=seed)["pid"]

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self._lines.send({"do": do, **fields})
        answer = self._lines.receive()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    @property
    def checksums(self) -> list[int]:
        return self.ask("checksums")["checksums"]

    def end(self) -> None:
        self._lines.close()


class Handoff:
    """A connected joiner's end, and what the source exported to it."""

    def __init__(self, source: Source, tensors: Tensors, transport: str = "rdma") -> None:
        self.source = source
        self.tensors = tensors
        self.transport = transport
        self._port = 0
        joiner = Rdma().joiner(self._dial) if transport == "rdma" else Tcp().joiner(self._dial)
        self.end: JoinerEnd = joiner
        self.end.prepare(tensors.memory)
        accepted = source.ask("accept", transport=transport, hello=self.end.hello().hex(), timeout_s=CONNECT_TIMEOUT_S)
        self._port = accepted["port"]
        self.end.connect(bytes.fromhex(accepted["answer"]), CONNECT_TIMEOUT_S)
        self.regions = [Region(*fields) for fields in source.ask("export", transport=transport)["regions"]]

    def _dial(self, fields: dict[str, Any], timeout_s: float) -> socket.socket:
        sock = socket.create_connection((SOURCES, self._port), timeout=timeout_s)
        message = msgspec.msgpack.encode(fields)
        sock.sendall(len(message).to_bytes(4, "big") + message)
        return sock

    def read(self, work: Work, timeout_s: float = CHUNK_TIMEOUT_S) -> None:
        self.end.read(self.regions, self.tensors.memory, work, timeout_s)

    def failing_read(self, work: Work, timeout_s: float = CHUNK_TIMEOUT_S) -> str:
        """The reason for which it failed."""
        try:
            self.read(work, timeout_s)
        except TransferFailed as error:
            return str(error)
        raise AssertionError("the read went through")

    def close(self) -> None:
        self.end.close()
        self.source.ask("close", transport=self.transport)


class AfterChunks:
    """For `Work`: does something once, in the middle: when so many chunks have landed."""

    def __init__(self, count: int, act: Callable[[], Any]) -> None:
        self._left = count
        self._act = act
        self._done_s = math.inf

    def __call__(self, _: Chunk) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()
            self._done_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was done."""
        return round(time.monotonic() - self._done_s, 1)


def data_device() -> str:
    """The network device that carries RDMA on this host; the other host's has the same name."""
    return next(
        path.parent.name for path in Path("/sys/class/net").glob("*/address") if path.read_text().startswith("52:54:00:00:01:")
    )


def set_link(state: str, run: Callable[[list[str]], Any] = functools.partial(subprocess.run, check=True, timeout=30.0)) -> None:
    """Takes the link of the RDMA device down, or up again; `run` does it on the other host."""
    run(["ip", "link", "set", data_device(), state])


def wait_for_port(rdma: Rdma) -> str:
    """Until it can be used again; else why not."""
    deadline_s = time.monotonic() + STATE_TIMEOUT_S
    while (reason := rdma.probe()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return reason


def in_child(act: Callable[[], str]) -> tuple[int, str]:
    """Runs it in a process of its own: (wait status, what it returned)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, act().encode())
            os._exit(0)
        except BaseException as error:
            os.write(writing, repr(error).encode())
            os._exit(1)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    return os.waitpid(pid, 0)[1], text


def work_for(sizes: list[int], on_landed: Callable[[Chunk], None] = lambda _: None) -> Work:
    return Work(split(sizes), on_landed)
