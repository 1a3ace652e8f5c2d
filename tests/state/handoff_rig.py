"""Two ends of a hand-over in one process, and what may stand between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec
import torch

from tmd_worker.handoff.agreement import Agreed, propose
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.state.errors import StateError
from tmd_worker.state.handoff import memory_of, send_state
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.receiving import Origin, Received, Receiving
from tmd_worker.state.tracked import Tracked

DEADLINE_S = 10.0

Sides = tuple[Manifest | BaseException, BaseException | None]
Change = Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]]
#: What becomes of bytes on their way from the source; may raise Closed.
Damage = Callable[[bytes], bytes]


def hand_over(
    source: Tracked,
    target: Tracked,
    *,
    step: int,
    per_rank: bool = True,
    change: Change = lambda m, t: (m, t),
    damage: Damage | None = None,
    deadline_s: float = DEADLINE_S,
) -> Sides:
    """(the manifest or the receiver's error, the sender's error). `damage` is done on the control connection and on those of the
    data, once the two have agreed."""
    taken, heard = hand_over_told(
        source, target, step=step, per_rank=per_rank, change=change, damage=damage, deadline_s=deadline_s
    )
    return (taken.manifest if isinstance(taken, Received) else taken), heard


def hand_over_told(
    source: Tracked,
    target: Tracked,
    *,
    step: int,
    per_rank: bool = True,
    change: Change = lambda m, t: (m, t),
    damage: Damage | None = None,
    deadline_s: float = DEADLINE_S,
) -> tuple[Received | BaseException, BaseException | None]:
    """As `hand_over`, with how the state came."""
    taken: Received | BaseException
    with Lines(damage) as lines:
        one = OneSource(lines, *change(*source.full_state(step=step, epoch=3)), deadline_s)
        try:
            taken = one.draw(Receiving(target, per_rank=per_rank), target, Origin(0, "n0"))
        except StateError as error:
            taken = error
    return taken, one.heard


class OneSource:
    """A source at its end of some lines, and what a joiner does at the other one."""

    def __init__(self, lines: Lines, manifest: Manifest, tensors: list[torch.Tensor], deadline_s: float) -> None:
        self._lines = lines
        self._manifest, self._tensors = manifest, tensors
        self._deadline_s = deadline_s
        self._tcp = Tcp()
        self._agreed = Agreed(Transports([self._tcp]))
        self._theirs, self._ours = lines.line()
        #: What it ended with.
        self.heard: BaseException | None = None
        lines.start(self._send)

    def _send(self) -> None:
        with self._theirs, contextlib.closing(self._agreed):
            try:
                with Control(self._theirs, self._deadline_s) as control:
                    self._agreed.agree(control, memory_of(self._tensors), self._deadline_s)
                    self._lines.agreed.wait(DEADLINE_S)
                    send_state(control, self._agreed, self._manifest, self._tensors)
            except StateError as error:
                self.heard = error

    def _dial(self, fields: dict[str, object], timeout_s: float) -> socket.socket:
        served, dialed = self._lines.line()
        self._lines.start(lambda: self._tcp.serve(served, fields))
        return dialed

    def draw(self, receiving: Receiving, target: Tracked, origin: Origin) -> Received:
        """Raises StateError."""
        with self._ours, Control(self._ours, self._deadline_s) as control:
            memory = memory_of(target.in_reach())
            with contextlib.closing(
                propose(control, Transports([Tcp()]), "auto", self._dial, memory, self._deadline_s)
            ) as agreement:
                self._lines.agreed.set()
                return receiving.draw(origin, control, agreement)


class Lines:
    """Connections between the two ends, each with a relay in the middle that does the damage, and the threads that use them."""

    def __init__(self, damage: Damage | None) -> None:
        self._damage = damage
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.agreed = threading.Event()

    def line(self) -> tuple[socket.socket, socket.socket]:
        """The source's end and the joiner's."""
        source, joiner = socket.socketpair()
        self._sockets += [source, joiner]
        if self._damage is None:
            return source, joiner
        near, far = socket.socketpair()
        self._sockets += [near, far]
        self.start(lambda: forward(joiner, near, self._pass))
        return source, far

    def start(self, body: Callable[[], object]) -> None:
        thread = threading.Thread(target=body)
        self._threads.append(thread)
        thread.start()

    def _pass(self, data: bytes) -> bytes:
        with self._lock:
            return self._damage(data) if self._damage is not None and self.agreed.is_set() else data

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()


class Closed(Exception):
    """Raised by a `Damage` with the last bytes that get through."""


def forward(left: socket.socket, right: socket.socket, change: Damage) -> None:
    """Carries bytes both ways until either end closes; those from left to right through `change`, which may end it."""

    def back() -> None:
        try:
            while data := right.recv(1 << 16):
                left.sendall(data)
            left.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    answers = threading.Thread(target=back)
    answers.start()
    try:
        while data := left.recv(1 << 16):
            right.sendall(change(data))
    except Closed as last:
        with contextlib.suppress(OSError):
            right.sendall(*last.args)
    except OSError:
        pass
    for sock in (left, right):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    answers.join(DEADLINE_S)


class Cut:
    """Lets `limit_bytes` pass, then closes the connections."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def __call__(self, data: bytes) -> bytes:
        if len(data) > self.left_bytes:
            raise Closed(data[: self.left_bytes])
        self.left_bytes -= len(data)
        return data


class Flip:
    """Changes one bit of the byte at `place`."""

    def __init__(self, place: int, bit: int) -> None:
        self.place, self.bit, self.passed = place, bit, 0

    def __call__(self, data: bytes) -> bytes:
        at = self.place - self.passed
        self.passed += len(data)
        if 0 <= at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << self.bit]) + data[at + 1 :]
        return data


def wire_bytes(source: Tracked) -> int:
    """How much the sender sends, about."""
    manifest, _ = source.full_state(step=4, epoch=3)
    return manifest.total_bytes + len(msgspec.msgpack.encode(manifest)) + 17 * len(manifest.entries)
