"""What becomes of a collective that is called now: sent, answered locally with valid values, or refused."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tmd_worker.core.rank import Admission
from tmd_worker.discard import StepDiscarded
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.events import FabricEvents
from tmd_worker.transport.group import Group
from tmd_worker.transport.recording import BuildRecording
from tmd_worker.transport.work import Operation, TmdWork

_REMEDY = (
    "{name} was called after this step's commit vote and before its end: if it failed on some ranks only, they would go on with "
    "different values. Move it before optimizer.step(), or, if its result is only logged, put it in `with session.log_only():`. "
    "If a DDP module called it, in a pass for another optimizer, track the one that has stepped with undo=True"
)


class Counted(enum.Enum):
    COLLECTIVE = enum.auto()
    RECEIVE = enum.auto()
    NOT = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a process group's method."""

    name: str
    group: Group
    #: What the future of the work yields.
    result: Any
    #: What the call writes.
    outputs: Sequence[Tensor]
    #: Hands it to whatever thread runs it, with the links that are live now.
    dispatch: Callable[[Operation, LinkTable], None]
    #: Writes valid values without any peer.
    local: Callable[[], None]
    #: Its answer can be recorded and replayed: it counts among the group's collectives, its receives, or not at all (a send).
    counted: Counted = Counted.COLLECTIVE
    #: Group rank of the sender that a receive from any names when there is no peer.
    source: int = -1


class Calls:
    """The rules for one process."""

    def __init__(self, events: FabricEvents) -> None:
        self._events = events
        #: While True every collective is local, with valid values.
        self.sandbox = False
        #: Takes the answers of live collectives while the script builds.
        self.recorder: BuildRecording | None = None
        #: Has the answers that sandboxed collectives give.
        self.rehearsal: BuildRecording | None = None
        self._log_only = 0
        #: How many receives each group has seen.
        self._receives: dict[str, itertools.count[int]] = collections.defaultdict(itertools.count)

    def start_recording(self) -> None:
        """From now on the results of small live collectives are kept (the build phase)."""
        self.recorder = BuildRecording()

    def stop_recording(self) -> BuildRecording:
        """Ends the recording and returns it; on a standby that of the build which it has rehearsed."""
        recording, self.recorder = self.recorder, None
        return next(known for known in (recording, self.rehearsal, BuildRecording()) if known is not None)

    @contextlib.contextmanager
    def log_only(self) -> Iterator[None]:
        """Collectives of this block may follow the vote; when poisoned their floats are NaN."""
        self._log_only += 1
        try:
            yield
        finally:
            self._log_only -= 1

    def begin(self, call: Call) -> TmdWork:
        """Raises StepDiscarded when poisoned, RuntimeError after the vote."""
        log_only = self._log_only > 0
        admission = self.admission(log_only=log_only)
        if admission is Admission.DISCARD:
            raise StepDiscarded(f"{call.name} was called in a step whose links are closed")
        if admission is Admission.AFTER_VOTE:
            raise RuntimeError(_REMEDY.format(name=call.name))
        work = TmdWork(call.result, lambda: self._complaint(call.name), call.source)
        operation = Operation(call.name, call.outputs, call.local, work, log_only)
        self._count(call, operation)
        if admission is Admission.PROCEED:
            table = call.group.table
            if call.group.gone:
                operation.fail(call.group.gone)
            elif table is None:
                operation.discard()  # closed since it was admitted
            else:
                call.dispatch(operation, table)
        elif admission is Admission.SANDBOX:
            if not self._replayed(operation):
                operation.complete_locally()
        else:
            operation.discard_quietly()
        return work

    def admission(self, *, log_only: bool = False) -> Admission:
        """As of now, in the calling thread."""
        if self.sandbox:
            return Admission.SANDBOX
        in_autograd = torch._C._current_graph_task_id() != -1
        return self._events.admit(in_autograd=in_autograd, log_only=log_only)

    def _complaint(self, name: str) -> BaseException | None:
        """What waiting on a discarded operation raises now: nothing inside autograd."""
        admission = self.admission()
        if admission in (Admission.LOCAL, Admission.SANDBOX):
            return None
        if admission is Admission.AFTER_VOTE:
            return RuntimeError(_REMEDY.format(name=f"the wait for {name}"))
        return StepDiscarded(f"a link broke during {name}")

    def forget(self, group: str) -> None:
        """Nothing is called on this group any more."""
        self._receives.pop(_received(group), None)

    def _count(self, call: Call, operation: Operation) -> None:
        if call.counted is Counted.COLLECTIVE:
            operation.series, operation.index = call.group.name, call.group.next_index()
        elif call.counted is Counted.RECEIVE:
            operation.series = _received(call.group.name)
            operation.index = next(self._receives[operation.series])

    def _replayed(self, operation: Operation) -> bool:
        rehearsal = self.rehearsal
        if rehearsal is None or not operation.series:
            return False
        if not rehearsal.replay(operation.series, operation.index, operation.name, operation.outputs):
            return False
        operation.complete()
        return True


def _received(group: str) -> str:
    """The series of the group's receives."""
    return f"{group}#received"
