"""A state or a record handed over a connected, already authenticated control socket; the tensors' bytes by a transport of
`handoff`.

State: manifest and exported regions down, answer up, the bytes read by the joiner, answer up, digests of all pieces (xxh3_128)
down, answer up. An answer is either "go on" or a refusal with its reason, so both sides know. Whatever goes wrong raises
TransferBroken or StateMismatch with the entry's name; before the first byte of an entry is received nothing is touched, after
it `Tracked.intact` is False until all is well. A chunk that arrives damaged is read once more. `deadline_s` bounds the time in
which nothing at all moves.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from tmd_worker import faults
from tmd_worker.handoff.agreement import Agreed, Agreement
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.digests import Digests
from tmd_worker.handoff.pulling import Puller
from tmd_worker.handoff.transfer import Chunk, Memory, Region, TransferFailed, split
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.tensors import size_bytes
from tmd_worker.state.tracked import Tracked

#: How often a joiner whose chunks arrive tells the source so.
BEAT_S = 1.0


class _Handed(msgspec.Struct, frozen=True):
    """`exports`: the agreed transport's regions and the spare one's, in the order of the entries. `refusal`: the source's state
    cannot be handed over."""

    manifest: Manifest | None
    exports: dict[str, tuple[Region, ...]] = {}
    refusal: str = ""


class _Answer(msgspec.Struct, frozen=True):
    #: Empty: go on.
    refusal: str = ""
    #: The state does not fit, however often it is sent; else it only did not arrive.
    misfit: bool = False
    #: No answer yet: bytes are arriving.
    beat: bool = False


_GO_ON = _Answer()


class _Records(msgspec.Struct, frozen=True):
    step: int
    record: bytes | None
    tail: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """What is in place now, and how it came."""

    manifest: Manifest
    #: Sentences for people: the transport and what became of it.
    why: str
    bytes_by_transport: dict[str, int]
    #: Seconds for the description and its check, the bytes, their digests, and putting all in place.
    parts_s: dict[str, float]


def memory_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    """Of dense CPU memory."""
    return [Memory(tensor.data_ptr(), size_bytes(tensor)) for tensor in tensors]


def refuse_state(control: Control, error: StateError) -> None:
    """Instead of `send_state`, if there is nothing that could be sent. Best effort."""
    try:
        control.send("a refusal", _Handed(None, refusal=str(error)))
    except TransferBroken:
        pass


def send_state(control: Control, agreed: Agreed, manifest: Manifest, tensors: list[torch.Tensor]) -> None:
    """Returns once the receiver said that it holds the state. Raises StateMismatch if it refuses the manifest."""
    memory = memory_of(tensors)
    exports = {}
    for name, end in agreed.ends.items():
        try:
            exports[name] = end.export(memory)
        except TransferFailed:
            continue  # the joiner takes the other one, and says so
    control.send("the manifest", _Handed(manifest, exports))
    _hear(control, "the answer to the manifest")
    digests = Digests(memory, split([part.size_bytes for part in memory]))
    taken = digests.take_all()
    _hear(control, "the word that the bytes have come")  # until then nobody takes the digests, which may fill every buffer
    control.send_bytes("the digests", taken)
    _hear(control, "the word that all has arrived")


def receive_state(
    control: Control,
    agreement: Agreement,
    tracked: Tracked,
    *,
    per_rank: bool,
    received: Callable[[int], None] = lambda _: None,
) -> Received:
    """`received` is told at the end how many bytes of tensors have come, whether they were of use or not."""
    clock = _Clock()
    try:
        handed = control.receive("the manifest", _Handed)
        manifest = handed.manifest
        if manifest is None:
            raise StateMismatch(f"the source cannot hand its state over: {handed.refusal}")
        plan = tracked.prepare_load(manifest, per_rank=per_rank)
    except StateError as error:
        _refuse(control, error)
        raise
    control.send("an answer", _GO_ON)
    plan.begin()
    faults.point("state.copying")
    clock.mark("manifest")
    memory = memory_of(plan.destinations)
    chunks = split([part.size_bytes for part in memory])
    digests = Digests(memory, chunks)
    beat = _Beat(control)

    def landed(chunk: Chunk) -> None:
        digests.take(chunk)
        beat()

    puller = Puller(agreement, handed.exports, memory, landed, control.deadline_s)
    try:
        puller.move(chunks)
        clock.mark("bytes")
        control.send("an answer", _GO_ON)
        _make_sure(puller, digests, control.receive_bytes("the digests"), manifest.entries)
        clock.mark("digests")
        plan.finish()
    except (StateError, TransferFailed) as error:
        failure = error if isinstance(error, StateError) else TransferBroken(f"the link broke while receiving the state: {error}")
        _refuse(control, failure)
        raise failure from error
    finally:
        received(puller.bytes_by_transport.total())
    control.send("an answer", _GO_ON)
    clock.mark("place")
    return Received(manifest, puller.why, dict(puller.bytes_by_transport), clock.parts_s)


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


class _Clock:
    """Seconds between one mark and the next."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.parts_s: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now_s = time.monotonic()
        self.parts_s[part] = now_s - self._last_s
        self._last_s = now_s


class _Beat:
    """Tells the source from time to time that its bytes arrive: of one-sided reads it sees nothing itself."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._last_s = time.monotonic()

    def __call__(self) -> None:
        with self._lock:
            if time.monotonic() - self._last_s < BEAT_S:
                return
            self._last_s = time.monotonic()
            try:
                self._control.send("a beat", _Answer(beat=True))
            except TransferBroken:
                pass  # what becomes of the transfer will show


def _make_sure(puller: Puller, digests: Digests, theirs: bytes, entries: tuple[TensorEntry, ...]) -> None:
    """Raises TransferBroken naming the first entries that differ, also after their chunks were read once more."""
    try:
        damaged, wrong = digests.differing(theirs)
        if damaged:
            puller.distrust()
            puller.why += f"; {len(damaged)} chunks arrived damaged and were read again over {puller.spare_name}"
            puller.move(damaged)
            _, wrong = digests.differing(theirs)
    except ValueError as error:
        raise TransferBroken(f"{error}; the state must be loaded again") from error
    if wrong:
        names = [entries[entry].name for entry in wrong]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise TransferBroken(
            f"{', '.join(names[:3])}{more} arrived with other bytes than were sent; the state must be loaded again"
        )


def _refuse(control: Control, error: StateError) -> None:
    """Best effort: the reason matters more here than that the other side hears it."""
    try:
        control.send("an answer", _Answer(str(error), isinstance(error, StateMismatch)))
    except TransferBroken:
        pass


def _hear(control: Control, what: str) -> None:
    answer = control.receive(what, _Answer)
    while answer.beat:
        answer = control.receive(what, _Answer)
    if answer.refusal:
        kind = StateMismatch if answer.misfit else TransferBroken
        raise kind(f"the receiver refused the state: {answer.refusal}")
