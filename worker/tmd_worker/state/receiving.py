"""A joiner takes a state that one or several sources hold: each moves its share of the chunks, one of them says what all of them
should hold.

Contract: `draw` is called for each source, in a thread of its own, whenever that source is ready. Whoever is first leads: its
manifest is checked and loaded, and its digests are what counts, whoever brought the bytes; chunks that differ from them are read
again from the leader. A source that fails, or that the others have waited for in vain, leaves its share to them, and the lead if
it had it. Before the first byte of an entry is received nothing is touched, after it `Tracked.intact` is False until all is
well. Once one `draw` has returned, or the last has raised, nothing is written any more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tmd.protocol.handoff import HandoffSource
from tmd_worker import faults
from tmd_worker.handoff.agreement import Agreement
from tmd_worker.handoff.control import BEAT_S, Beats, Control
from tmd_worker.handoff.digests import Digests
from tmd_worker.handoff.pulling import Puller
from tmd_worker.handoff.transfer import PATIENCE_S, Chunk, Memory, SharedChunks, TransferFailed, split
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.handoff import BYTES_ARRIVE, GO_ON, Answer, Handed, memory_of, receive_digests
from tmd_worker.state.handover import LoadPlan
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.tracked import Tracked

#: All that a source need know once the state is in place.
_ENOUGH = Answer(digests=False)


class Origin(NamedTuple):
    """A source, for people."""

    rank: int
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """What is in place now, and how it came."""

    manifest: Manifest
    #: What was agreed on with the sources that stayed to the end.
    transport: str
    #: Sentences for people: the transports and what became of each source.
    why: str
    #: Who has brought bytes, those among them that did not stay too; in the order in which they were ready.
    sources: tuple[HandoffSource, ...]
    #: Seconds for the description and its check, the bytes, their digests, and putting all in place.
    parts_s: dict[str, float]

    @property
    def bytes_by_transport(self) -> dict[str, int]:
        moved: collections.Counter[str] = collections.Counter()
        for source in self.sources:
            moved[source.transport] += source.size_bytes
        return dict(moved)


@dataclasses.dataclass(eq=False, slots=True)
class _Part:
    """What one source does in it."""

    origin: Origin
    control: Control
    agreement: Agreement
    puller: Puller
    beat: Beats
    #: Why it did no more; empty: it did not fail.
    left: str = ""


class Receiving:
    """One state on its way into what is tracked. See the module's contract."""

    def __init__(
        self,
        tracked: Tracked,
        *,
        per_rank: bool,
        step: int | None = None,
        received: Callable[[int], None] = lambda _: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`step`: before which the state has to be, if that is known. `received` is told in the end how many bytes of tensors
        have come, whether they were of use or not. `patience_s`: see `sharing`."""
        self._tracked = tracked
        self._per_rank = per_rank
        self._step = step
        self._received = received
        self._patience_s = patience_s
        #: Guards all below.
        self._changed = threading.Condition()
        self._clock = _Clock()
        self._load: _Load | None = None
        self._parts: list[_Part] = []
        self._lead: _Part | None = None
        self._taken: Received | None = None

    def draw(self, origin: Origin, control: Control, agreement: Agreement) -> Received:
        """All that this source does in it; returns once the state is in place. Raises StateError when it can do no more: another
        source still may."""
        with self._changed:
            self._clock.begin()
        handed = control.receive("the manifest", Handed)
        try:
            load, part = self._admit(origin, control, agreement, handed)
        except StateError as error:
            _refuse(control, error)
            raise
        try:
            control.send("an answer", GO_ON if part is self._lead else _ENOUGH)
            part.puller.move(load.chunks)
            return self._settle(load, part)
        except (StateError, TransferFailed) as error:
            failure = (
                error if isinstance(error, StateError) else TransferBroken(f"the link broke while receiving the state: {error}")
            )
            self._lose(part, str(error))
            _refuse(control, failure)
            raise failure from error

    def _admit(self, origin: Origin, control: Control, agreement: Agreement, handed: Handed) -> tuple[_Load, _Part]:
        """Raises StateError; with the first source, before anything was touched."""
        manifest = handed.manifest
        if manifest is None:
            raise StateMismatch(f"the source cannot hand its state over: {handed.refusal}")
        if self._step is not None and manifest.step != self._step:
            raise TransferBroken(f"{origin} sent its state before step {manifest.step}, expected {self._step}")
        with self._changed:
            if self._taken is not None:
                raise TransferBroken("the state has come from other sources meanwhile")
            if self._load is None:
                self._load = _Load(self._tracked, manifest, per_rank=self._per_rank, patience_s=self._patience_s)
                self._clock.mark("manifest")
            elif manifest.entries != self._load.manifest.entries:
                raise StateMismatch(f"{origin} describes other tensors than {self._parts[0].origin}; its state was not used")
            load = self._load
            puller = Puller(agreement, handed.exports, load.memory, self._landed, control.deadline_s)
            part = _Part(origin, control, agreement, puller, control.beats(BYTES_ARRIVE))
            self._parts.append(part)
            if self._lead is None:
                self._lead = part
            return load, part

    def _landed(self, chunk: Chunk) -> None:
        assert self._load is not None
        self._load.digests.take(chunk)
        self._beat()

    def _beat(self) -> None:
        for part in list(self._parts):
            if not part.left:
                part.beat()

    def _settle(self, load: _Load, part: _Part) -> Received:
        """Every chunk has landed. The leader makes sure of them; if it fails, the next one does."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._taken is not None or self._lead in (None, part), BEAT_S):
                self._beat()  # the leader is bound by its own deadlines
            taken = self._taken
            if taken is None:
                self._lead = part
        if taken is None:
            taken = self._finish(load, part)
            last = GO_ON
        else:
            last = _ENOUGH
        with contextlib.suppress(TransferBroken):
            part.control.send("an answer", last)  # what is in place stays there if nobody hears it
        return taken

    def _finish(self, load: _Load, lead: _Part) -> Received:
        self._clock.mark("bytes")
        lead.control.send("an answer", GO_ON)
        make_sure(lead.puller, load.digests, receive_digests(lead.control), load.manifest.entries)
        self._clock.mark("digests")
        load.plan.finish()
        self._clock.mark("place")
        with self._changed:
            stayed = [part for part in self._parts if not part.left]
            for part in stayed:
                self._received(part.puller.bytes_by_transport.total())
            self._taken = Received(
                manifest=load.manifest,
                transport=", ".join(sorted({part.agreement.transport for part in stayed})),
                why=_why(self._parts),
                sources=tuple(source for part in self._parts for source in _sources(part)),
                parts_s=self._clock.parts_s,
            )
            self._changed.notify_all()
            return self._taken

    def _lose(self, part: _Part, reason: str) -> None:
        with self._changed:
            if not part.left and self._taken is None:
                self._received(part.puller.bytes_by_transport.total())
            part.left = reason
            if self._lead is part:
                self._lead = None
            self._changed.notify_all()


class _Load:
    """What the first manifest led to: where the bytes go, in which chunks."""

    def __init__(self, tracked: Tracked, manifest: Manifest, *, per_rank: bool, patience_s: float) -> None:
        """Raises StateMismatch before anything was touched."""
        self.manifest = manifest
        self.plan: LoadPlan = tracked.prepare_load(manifest, per_rank=per_rank)
        self.plan.begin()
        faults.point("state.copying")
        self.memory: list[Memory] = memory_of(self.plan.destinations)
        chunks = split([part.size_bytes for part in self.memory])
        self.chunks = SharedChunks(chunks, patience_s)
        self.digests = Digests(self.memory, chunks)


class _Clock:
    """Seconds between one mark and the next."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self.parts_s: dict[str, float] = {}

    def begin(self) -> None:
        """The first call counts."""
        self._last_s = self._last_s or time.monotonic()

    def mark(self, part: str) -> None:
        now_s = time.monotonic()
        self.parts_s[part] = self.parts_s.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s


def make_sure(lead: Puller, digests: Digests, theirs: bytes, entries: tuple[TensorEntry, ...]) -> None:
    """`theirs`: the leader's digests. Raises TransferBroken naming the first entries that differ, also after their chunks were
    read once more, from the leader."""
    try:
        damaged, wrong = digests.differing(theirs)
        if damaged:
            own = sum(chunk.number in lead.brought for chunk in damaged)
            if own:
                lead.distrust()
                lead.why += f"; {own} chunks arrived damaged and were read again over {lead.spare_name}"
            if len(damaged) > own:
                lead.why += (
                    f"; {len(damaged) - own} chunks of other sources differed from what it holds and were read again from it"
                )
            lead.move(damaged)
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
        control.send("an answer", Answer(str(error), isinstance(error, StateMismatch)))
    except TransferBroken:
        pass


def _why(parts: Iterable[_Part]) -> str:
    """Sources of which the same is to be said share a sentence; a single one needs no name."""
    said: dict[str, list[Origin]] = {}
    for part in parts:
        text = f"{part.puller.why}; it was left: {part.left}" if part.left else part.puller.why
        said.setdefault(text, []).append(part.origin)
    if sum(map(len, said.values())) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(map(str, origins))}: {text}" for text, origins in said.items())


def _sources(part: _Part) -> list[HandoffSource]:
    return [
        HandoffSource(rank=part.origin.rank, node=part.origin.node, transport=transport, size_bytes=size_bytes)
        for transport, size_bytes in part.puller.bytes_by_transport.items()
    ]
