"""A state or a record over a connected, already authenticated socket, straight into place, every byte covered by a digest.

State: manifest down, answer up, bytes of all entries, then their digests (xxh3_128, in order) down, answer up. An answer is
either "go on" or a refusal with its reason, so both sides know. Whatever goes wrong raises TransferBroken or StateMismatch with
the entry's name; before the first byte of an entry is received nothing is touched, after it `Tracked.intact` is False until all
is well. `deadline_s` bounds the time in which nothing at all moves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from tmd_worker import faults
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.stream import DIGEST_BYTES, Stream
from tmd_worker.state.tracked import Tracked

_Message = TypeVar("_Message")


class _Answer(msgspec.Struct, frozen=True):
    #: Empty: go on.
    refusal: str = ""
    #: The state does not fit, however often it is sent; else it only did not arrive.
    misfit: bool = False


_GO_ON = _Answer()


class _Records(msgspec.Struct, frozen=True):
    step: int
    record: bytes | None
    tail: bytes | None


def send_state(sock: socket.socket, manifest: Manifest, tensors: list[torch.Tensor], deadline_s: float) -> None:
    """Returns once the receiver said that it holds the state. Raises StateMismatch if it refuses the manifest."""
    with Stream(sock, deadline_s) as stream:
        stream.send_frame("the manifest", msgspec.msgpack.encode(manifest))
        _hear(stream, "the answer to the manifest")
        digests = stream.send_entries(_names(manifest.entries), tensors)
        stream.send_frame("the digests", b"".join(digests))
        _hear(stream, "the word that all has arrived")


def receive_state(
    sock: socket.socket,
    tracked: Tracked,
    deadline_s: float,
    *,
    per_rank: bool,
    received: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Returns the manifest of what is in place now (`step`, `total_bytes`, the source's record). `received`: see Stream."""
    with Stream(sock, deadline_s, received) as stream:
        try:
            manifest = _decoded(stream.receive_frame("the manifest"), Manifest, "the manifest")
            plan = tracked.prepare_load(manifest, per_rank=per_rank)
        except StateError as error:
            _refuse(stream, error)
            raise
        _answer(stream)
        plan.begin()
        faults.point("state.copying")
        digests = stream.receive_entries(_names(manifest.entries), plan.destinations)
        try:
            _compare(manifest.entries, digests, stream.receive_frame("the digests"))
            plan.finish()
        except StateError as error:
            _refuse(stream, error)
            raise
        _answer(stream)
    return manifest


def send_record(sock: socket.socket, step: int, record: bytes | None, tail: bytes | None, deadline_s: float) -> None:
    """A ward's record as its buddy holds it. None: not held (record), not known (tail; b"" is "nothing changed")."""
    with Stream(sock, deadline_s) as stream:
        stream.send_frame(f"the record of step {step}", msgspec.msgpack.encode(_Records(step, record, tail)))


def receive_record(
    sock: socket.socket, step: int, deadline_s: float, *, received: Callable[[int], None] = lambda _: None
) -> tuple[bytes | None, bytes | None]:
    """(record, tail) of `step`. Raises TransferBroken, also if the record is of another step."""
    what = f"the record of step {step}"
    with Stream(sock, deadline_s, received) as stream:
        records = _decoded(stream.receive_frame(what), _Records, what)
    if records.step != step:
        raise TransferBroken(f"the record of step {records.step} came where {what} is expected; nothing was changed")
    return records.record, records.tail


def _names(entries: tuple[TensorEntry, ...]) -> list[str]:
    return [entry.name for entry in entries]


def _compare(entries: tuple[TensorEntry, ...], ours: list[bytes], theirs: bytes) -> None:
    """Raises TransferBroken naming the first entries that differ."""
    if len(theirs) != DIGEST_BYTES * len(ours):
        raise TransferBroken(f"{len(theirs)} bytes of digests came for {len(ours)} entries; the state must be loaded again")
    damaged = [
        entry.name
        for number, (entry, digest) in enumerate(zip(entries, ours, strict=True))
        if theirs[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] != digest
    ]
    if damaged:
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise TransferBroken(
            f"{', '.join(damaged[:3])}{more} arrived with other bytes than were sent; the state must be loaded again"
        )


def _decoded(data: bytes, kind: type[_Message], what: str) -> _Message:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise TransferBroken(f"{what} is malformed: {error}; nothing was changed") from error


def _answer(stream: Stream, answer: _Answer = _GO_ON) -> None:
    stream.send_frame("an answer", msgspec.msgpack.encode(answer))


def _refuse(stream: Stream, error: StateError) -> None:
    """Best effort: the reason matters more here than that the other side hears it."""
    try:
        _answer(stream, _Answer(str(error), isinstance(error, StateMismatch)))
    except TransferBroken:
        pass


def _hear(stream: Stream, what: str) -> None:
    answer = _decoded(stream.receive_frame(what), _Answer, what)
    if answer.refusal:
        kind = StateMismatch if answer.misfit else TransferBroken
        raise kind(f"the receiver refused the state: {answer.refusal}")
