"""A state or a record handed over a connected, already authenticated control socket, from the source's side. The tensors' bytes
go by a transport of `handoff`; the joiner's side of a state is `receiving`.

State: manifest and exported regions down, answer up, the bytes read by the joiner, answer up, digests of all pieces (xxh3_128)
down, answer up. An answer is "go on", a refusal with its reason, so both sides know, or that this source's digests are not
needed: others have the same bytes. Whatever goes wrong raises TransferBroken or StateMismatch with the entry's name. `deadline_s`
bounds the time in which nothing at all moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from tmd_worker.handoff.agreement import Agreed
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.digests import Digests
from tmd_worker.handoff.transfer import Memory, Region, TransferFailed, split
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.tensors import size_bytes


class Handed(msgspec.Struct, frozen=True):
    """What a source says first. `exports`: the agreed transport's regions and the spare one's, in the order of the entries.
    `refusal`: the source's state cannot be handed over."""

    manifest: Manifest | None
    exports: dict[str, tuple[Region, ...]] = {}
    refusal: str = ""


class Answer(msgspec.Struct, frozen=True):
    #: Empty: go on.
    refusal: str = ""
    #: The state does not fit, however often it is sent; else it only did not arrive.
    misfit: bool = False
    #: No answer yet: bytes are arriving.
    beat: bool = False
    #: The digests are wanted: after the manifest, as soon as they can be had; after the bytes, now. False then: this is all.
    digests: bool = True


GO_ON = Answer()
BYTES_ARRIVE = msgspec.msgpack.encode(Answer(beat=True))
#: In place of digests that are still being computed; no digests are so long.
_AT_WORK = b"."


class _Records(msgspec.Struct, frozen=True):
    step: int
    record: bytes | None
    tail: bytes | None


def memory_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    """Of dense CPU memory."""
    return [Memory(tensor.data_ptr(), size_bytes(tensor)) for tensor in tensors]


def refuse_state(control: Control, error: StateError) -> None:
    """Instead of `send_state`, if there is nothing that could be sent. Best effort."""
    try:
        control.send("a refusal", Handed(None, refusal=str(error)))
    except TransferBroken:
        pass


def send_state(control: Control, agreed: Agreed, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
    """Returns once the receiver said that it holds the state, or what it wanted of it. Raises StateMismatch if it refuses the
    manifest."""
    memory = memory_of(tensors)
    exports = {}
    for name, end in agreed.ends.items():
        try:
            exports[name] = end.export(memory)
        except TransferFailed:
            continue  # the joiner takes the other one, and says so
    control.send("the manifest", Handed(manifest, exports))
    at_once = _hear(control, "the answer to the manifest").digests
    digests = Digests(memory, split([part.size_bytes for part in memory]))
    beats = control.beats(_AT_WORK)
    taken = digests.take_all(beats) if at_once else None
    if not _hear(control, "the word that the bytes have come").digests:
        return
    # Until then nobody takes the digests, which may fill every buffer.
    control.send_bytes("the digests", digests.take_all(beats) if taken is None else taken)
    _hear(control, "the word that all has arrived")


def receive_digests(control: Control) -> bytes:
    """However long the source needs, as long as it gets on. Raises TransferBroken."""
    digests = control.receive_bytes("the digests")
    while digests == _AT_WORK:
        digests = control.receive_bytes("the digests")
    return digests


def send_record(control: Control, step: int, record: bytes | None, tail: bytes | None) -> None:
    """A ward's record as its buddy holds it. None: not held (record), not known (tail; b"" is "nothing changed")."""
    control.send(f"the record of step {step}", _Records(step, record, tail))


def receive_record(control: Control, step: int) -> tuple[bytes | None, bytes | None]:
    """(record, tail) of `step`. Raises TransferBroken, also if the record is of another step."""
    what = f"the record of step {step}"
    records = control.receive(what, _Records)
    if records.step != step:
        raise TransferBroken(f"the record of step {records.step} came where {what} is expected; nothing was changed")
    return records.record, records.tail


def _hear(control: Control, what: str) -> Answer:
    answer = control.receive(what, Answer)
    while answer.beat:
        answer = control.receive(what, Answer)
    if answer.refusal:
        kind = StateMismatch if answer.misfit else TransferBroken
        raise kind(f"the receiver refused the state: {answer.refusal}")
    return answer
