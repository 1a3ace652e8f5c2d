"""Two ends agree on a transport over the control channel, before the pause.

The joiner offers every transport that the mode allows, with its hello, or the obstacle on its side. The source answers for each
with its own half, or the obstacle there. The joiner connects the best that both can use, reads some bytes through it, and says
which one it is. If that fails it takes the next. The last transport stays open beside it: it finishes what the agreed one
began.

Contract: a mode that names one transport gets this one or TransferFailed with the reasons of both ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from tmd.protocol.handoff import TransferMode
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.transfer import Dial, JoinerEnd, Memory, SourceEnd, TransferFailed


class Half(msgspec.Struct, frozen=True, array_like=True):
    """One end's half of what a transport needs; `obstacle`: why it cannot be used there, else empty."""

    transport: str
    words: bytes = b""
    obstacle: str = ""


class Offer(msgspec.Struct, frozen=True):
    """First from the joiner, best first; then the source's answer in the same order."""

    halves: tuple[Half, ...]


class Choice(msgspec.Struct, frozen=True):
    """Last from the joiner. `transport` empty: none, and `why` says why."""

    transport: str
    why: str


@dataclasses.dataclass(slots=True)
class Agreement:
    """The joiner's. `spare` is not connected yet; it may be `end` itself."""

    transport: str
    why: str
    end: JoinerEnd
    spare: JoinerEnd
    spare_name: str
    #: For `JoinerEnd.connect` of the spare.
    spare_words: bytes

    def close(self) -> None:
        self.end.close()
        self.spare.close()


def propose(
    control: Control, transports: Transports, mode: TransferMode, dial: Dial, memory: Sequence[Memory], timeout_s: float
) -> Agreement:
    """The joiner's side. `memory` will probably be written into. Raises TransferFailed or TransferBroken."""
    wanted = {transport.name for transport in transports.wanted(mode)}
    ends: dict[str, JoinerEnd] = {}
    try:
        halves = []
        for transport in transports.all:
            if transport.name not in wanted and transport is not transports.spare:
                continue
            obstacle, words = transport.probe(), b""
            if not obstacle:
                end = ends[transport.name] = transport.joiner(dial)
                try:
                    end.prepare(memory)
                    words = end.hello()
                except TransferFailed as error:
                    obstacle = str(error)
            halves.append(Half(transport.name, words, obstacle))
        control.send("an offer of transports", Offer(tuple(halves)))
        answers = control.receive("the answer to an offer of transports", Offer).halves
        choice, chosen = _connect(halves, answers, wanted, ends, timeout_s)
        control.send("the choice of a transport", choice)
        if chosen is None:
            raise TransferFailed(choice.why)
        spare = transports.spare.name
        words = next((half.words for half in answers if half.transport == spare), b"")
        for name in ends.keys() - {choice.transport, spare}:
            ends[name].close()
        return Agreement(choice.transport, choice.why, chosen, ends[spare], spare, words)
    except BaseException:
        for end in ends.values():
            end.close()
        raise


def _connect(
    ours: Sequence[Half], theirs: Sequence[Half], wanted: set[str], ends: dict[str, JoinerEnd], timeout_s: float
) -> tuple[Choice, JoinerEnd | None]:
    """The first that can be connected."""
    against: list[str] = []
    answered = {half.transport: half for half in theirs}
    for half in ours:
        name, answer = half.transport, answered.get(half.transport)
        if name not in wanted:
            continue
        if half.obstacle:
            against.append(f"{name} cannot be used on the joiner's node: {half.obstacle}")
        elif answer is None or answer.obstacle:
            against.append(
                f"{name} cannot be used on the source's node: {answer.obstacle if answer else 'it is not known there'}"
            )
        else:
            try:
                ends[name].connect(answer.words, timeout_s)
            except TransferFailed as error:
                against.append(f"{name} was tried and failed: {error}")
                continue
            return Choice(name, "; ".join(against) or f"the best of {', '.join(sorted(wanted))}"), ends[name]
    return Choice("", "; ".join(against)), None


class Agreed:
    """The source's side: its ends of one handoff."""

    def __init__(self, transports: Transports) -> None:
        self._transports = {transport.name: transport for transport in transports.all}
        self._spare = transports.spare.name
        self._ends: dict[str, SourceEnd] = {}
        self.transport = ""

    def agree(self, control: Control, memory: Sequence[Memory], timeout_s: float) -> None:
        """`memory` will probably be read. Raises TransferFailed if no transport was found, or TransferBroken."""
        offer = control.receive("an offer of transports", Offer)
        names = [half.transport for half in offer.halves]
        if len(set(names)) != len(names):
            raise TransferFailed(f"the joiner's offer names a transport twice: {', '.join(names)}")
        halves = tuple(self._answer(half, memory, timeout_s) for half in offer.halves)
        control.send("the answer to an offer of transports", Offer(halves))
        choice = control.receive("the choice of a transport", Choice)
        if choice.transport not in self._ends:
            raise TransferFailed(choice.why)
        self.transport = choice.transport
        for name in self._ends.keys() - {choice.transport, self._spare}:
            self._ends.pop(name).close()

    def _answer(self, half: Half, memory: Sequence[Memory], timeout_s: float) -> Half:
        transport = self._transports.get(half.transport)
        if transport is None:
            return Half(half.transport, obstacle="this version does not have it")
        if half.obstacle:
            return Half(half.transport, obstacle="the joiner cannot use it")
        if obstacle := transport.probe():
            return Half(half.transport, obstacle=obstacle)
        end = self._ends[half.transport] = transport.source()
        try:
            end.prepare(memory)
            return Half(half.transport, end.accept(half.words, timeout_s))
        except TransferFailed as error:
            self._ends.pop(half.transport).close()
            return Half(half.transport, obstacle=str(error))

    @property
    def ends(self) -> dict[str, SourceEnd]:
        """By the name of the transport: the agreed one and the spare."""
        return self._ends

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
