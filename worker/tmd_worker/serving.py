"""What this rank serves to others: its state to a joiner, records to whoever takes a lost rank's place, answers of the build.

Contract: a handler sends nothing before the core says that this rank's state is the one asked for, and hangs up when it never
will be. The receiver checks digests, so a state that changed while it was sent is refused there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

from tmd.protocol.codec import LENGTH
from tmd_worker import guard
from tmd_worker.handoff.agreement import Agreed
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.probe import Transports
from tmd_worker.records import RecordShelf
from tmd_worker.runtime import Runtime
from tmd_worker.state.errors import StateMismatch, TrackRefused, TransferBroken
from tmd_worker.state.handoff import memory_of, refuse_state, send_record, send_state
from tmd_worker.state.tracked import Tracked
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.recording import BuildRecording

Answer = TypeVar("Answer")

#: A transfer in which nothing moves for this long is broken.
STATE_TIMEOUT_S = 20.0
#: How often a rank whose state is asked for too early tells the joiner that it lives: it may be in a step of any length.
BEAT_S = 1.0
#: What it says until then, one byte each: not yet; the state follows.
WAITING = b"."
READY = b"!"


class StateServer:
    """The handlers of one rank."""

    def __init__(
        self,
        runtime: Runtime,
        fabric: Fabric,
        tracked: Tracked,
        own: RecordShelf,
        inherited: RecordShelf,
        transports: Transports,
    ) -> None:
        self._runtime = runtime
        self._fabric = fabric
        self._tracked = tracked
        self._own = own
        self._inherited = inherited
        self._transports = transports
        self._reading = threading.Lock()
        self._recording: BuildRecording | None = None

    def start(self) -> None:
        self._fabric.serve("state", self._serve_state)
        self._fabric.serve("record", self._serve_record)
        self._fabric.serve("leaver", self._serve_leaver)
        self._fabric.serve("rehearsal", self._serve_rehearsal)

    def publish(self, recording: BuildRecording) -> None:
        """The build is over: standbys may have its answers."""
        with self._runtime.changed:
            self._recording = recording
            self._runtime.changed.notify_all()

    def _serve_state(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        core, step, epoch = self._runtime.core, int(fields["step"]), int(fields["epoch"])

        def at_rest() -> bool | None:
            return False if core.poisoned_epoch >= epoch else core.may_serve(step=step)

        with sock, closing(Agreed(self._transports)) as agreed:
            self._agree(sock, agreed)
            if self._beat_until(sock, at_rest):
                sock.sendall(READY)
                self._send_state(sock, agreed, step)

    def _serve_record(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        """The record of a ward that was lost: as it sent it, or as this rank took it over."""
        step = int(fields["step"]) - 1
        with sock:
            record, tail = self._ward_record(step)
            with Control(sock, STATE_TIMEOUT_S) as control:
                send_record(control, step, record, tail)

    def _serve_leaver(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        core, plan_id = self._runtime.core, int(fields["plan"])
        with sock, closing(Agreed(self._transports)) as agreed:
            self._agree(sock, agreed)
            try:
                step = self._beat_until(sock, lambda: core.leaver_step(plan_id))
            except LookupError:
                return
            sock.sendall(READY)
            self._send_state(sock, agreed, step)
            record, tail = self._ward_record(step - 1)
            with Control(sock, STATE_TIMEOUT_S) as control:
                send_record(control, step - 1, record, tail)

    def _serve_rehearsal(self, sock: socket.socket, _fields: dict[str, Any]) -> None:
        with sock:
            recording = self._wait_for(lambda: self._recording, self._runtime.welcome.hold_limit_s)
            if recording is not None:
                data = recording.to_bytes()
                sock.sendall(LENGTH.pack(len(data)) + data)

    def _agree(self, sock: socket.socket, agreed: Agreed) -> None:
        """Before this rank stands still. Raises OSError."""
        with Control(sock, STATE_TIMEOUT_S) as control:
            agreed.agree(control, memory_of(self._tracked.in_reach()), STATE_TIMEOUT_S)

    def _send_state(self, sock: socket.socket, agreed: Agreed, step: int) -> None:
        with Control(sock, STATE_TIMEOUT_S) as control:
            try:
                with self._reading:
                    manifest, tensors = self._tracked.full_state(step=step, epoch=self._runtime.core.run_epoch)
                send_state(control, agreed, manifest, tensors)
            except StateMismatch as error:
                raise TransferBroken(str(error)) from error  # ends this connection alone: it is the joiner that does not fit
            except TrackRefused as error:
                refuse_state(control, error)
                raise TransferBroken(str(error)) from error

    def _ward_record(self, step: int) -> tuple[bytes | None, bytes | None]:
        kept = self._fabric.buddy.ward_records(step)
        if kept is not None:
            return kept[0], kept[1]
        inherited = self._inherited.reply(step)
        return (None, None) if inherited is None else (inherited.record, inherited.tail)

    def _beat_until(self, sock: socket.socket, answer: Callable[[], Answer | None]) -> Answer:
        """The first answer that is not None; it comes with the end of this rank's step, or of the epoch or plan that asks."""
        while (value := self._wait_for(answer, BEAT_S)) is None:
            sock.sendall(WAITING)
        return value

    def _wait_for(self, answer: Callable[[], Answer | None], timeout_s: float) -> Answer | None:
        """The first answer that is not None, or None when the time is up."""
        deadline_s = time.monotonic() + timeout_s
        with self._runtime.changed:
            while (value := answer()) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._runtime.changed.wait(left_s)
            return value


def fetch_rehearsal(runtime: Runtime, fabric: Fabric) -> BuildRecording:
    """On a standby: the recorded answers of the build, from whichever member the daemon names. Waits until the job has been
    built, for as long as this standby's agent lives; a member that is lost meanwhile is asked for no longer."""
    while True:
        with runtime.changed:
            member = runtime.order.rehearse_from if runtime.order is not None else None
            if member is None:
                runtime.changed.wait(BEAT_S)
                continue
        try:
            with guard.exempt(), fabric.connect(member, "rehearsal", {}, STATE_TIMEOUT_S) as sock:
                sock.settimeout(runtime.welcome.hold_limit_s)
                (size,) = LENGTH.unpack(_receive(sock, LENGTH.size))
                return BuildRecording.from_bytes(_receive(sock, size))
        except OSError:
            time.sleep(BEAT_S)  # the daemon will name another member if this one is lost


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("closed before the end of the recording")
        data += piece
    return bytes(data)
