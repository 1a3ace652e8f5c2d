"""The loop of a rank under tmd: warm-up, then steps that count only once every rank has agreed to apply them.

Contract: a step lasts from one `__next__` to the next. An attempt that is discarded leaves nothing behind: its small state is
restored, its batches are given again, its gradients are gone (zeros where there was one before it, else None). Only this loop,
at a boundary, lets the main thread go on.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from tmd.protocol.exits import EXIT_TORN
from tmd_worker import faults, guard
from tmd_worker.check.findings import Finding
from tmd_worker.check.untracked import Untracked
from tmd_worker.core.rank import Boundary
from tmd_worker.discard import StepDiscarded
from tmd_worker.optimizers import Optimizers
from tmd_worker.runtime import Runtime
from tmd_worker.state.errors import TrackRefused
from tmd_worker.state.tracked import SmallSnapshot, Tracked
from tmd_worker.step import Step, StepMisused, draw_from
from tmd_worker.threads import end_process
from tmd_worker.transport.fabric import Fabric
from tmd_worker.voting import CommitVote
from tmd_worker.warmup import shadow_steps

_log = logging.getLogger(__name__)


class LiveLoop:
    """Drives the steps of one process; see the module's contract."""

    def __init__(self, runtime: Runtime, fabric: Fabric, tracked: Tracked, optimizers: Optimizers, vote: CommitVote) -> None:
        self._runtime = runtime
        self._fabric = fabric
        self._tracked = tracked
        self._optimizers = optimizers
        self._vote = vote
        self._snapshot: SmallSnapshot | None = None
        self._epoch = -1
        self._step: Step | None = None
        self._decided = False
        self._applied = False
        self._discarded = False

    # ---------------------------------------------------------------- the loop

    def warm_up(self, *, standby: bool) -> Iterator[Step]:
        """Shadow steps in sandbox; afterwards everything tracked is as it was after the build. Raises TrackRefused if the script
        was seen to change state that is not tracked (members only: a standby is built as they are)."""
        core = self._runtime.core
        self._runtime.tell(core.warm_up_begins)
        self._fabric.sandbox = True
        before = self._tracked.snapshot_all()
        untracked = Untracked(self._tracked)
        if not standby:
            untracked.begin(sys._getframe())
        yield from shadow_steps(self, untracked.watches)
        if not standby:
            untracked.steps_done(sys._getframe())
        self._tracked.restore_all(before, keep_allocated=standby)
        if not standby:
            self._complain(untracked.findings(restored=True))
        self._fabric.sandbox = standby
        self._runtime.tell(core.warm_up_ended)

    def _complain(self, findings: list[Finding]) -> None:
        """What is certain ends the job before its first step; the rest is said once, by rank 0."""
        fatal = [finding.line() for finding in findings if finding.fatal]
        if fatal:
            raise TrackRefused("the script changes state that session.track was not told of\n  " + "\n  ".join(fatal))
        if self._runtime.core.rank == 0:
            for finding in findings:
                _log.warning("%s", finding.line())

    def run(self, total: int) -> Iterator[Step]:
        """The live steps up to `total`, from wherever this rank's state is."""
        while True:
            self._vote.note_boundary()
            faults.point("boundary")
            turn = self._runtime.boundary()
            self._begin(turn)
            if turn.step < total:
                step = Step(self, turn.step, shadow=False)
                yield step
                step.require_body()
                faults.point("tail")
                if self._discarded:
                    self._roll_back()  # before the boundary: there this rank's state may be served to a joiner
            elif turn.step > total or self._finish():
                self._runtime.tell(self._runtime.core.finished)
                return

    def _begin(self, turn: Boundary) -> None:
        """Everything that belongs before the user's first line of the step."""
        faults.step = turn.step
        new_epoch = turn.epoch != self._epoch
        if new_epoch and self._fabric.sandbox:
            self._fabric.sandbox = False
            guard.deactivate()
        self._epoch = turn.epoch
        self._vote.send_tail(turn.step - 1, with_record=new_epoch)
        self._snapshot = self._tracked.snapshot_small()
        self._decided = self._applied = self._discarded = False
        self._runtime.late_backward = False
        faults.point("step.begin")

    def _roll_back(self) -> None:
        if self._snapshot is not None:
            self._tracked.restore_small(self._snapshot)

    def _finish(self) -> bool:
        """The vote after the last step: True once every rank has applied everything."""
        if not self._vote.cast(last=True):
            self._runtime.discard()
            return False
        self._runtime.core.applied()
        return True

    # ---------------------------------------------------------------- the vote, from an optimizer's hook or by hand

    def vote(self) -> None:
        """Returns if the step is to be applied; raises StepDiscarded if not. Only the first call in a step votes."""
        step = self._step
        if step is None or not self._runtime.in_body:
            raise StepMisused("a vote outside `with step:`")
        if self._decided or step.shadow:
            return
        if not self._vote.cast():
            raise StepDiscarded(f"step {step.index} is given up and will run again")
        self._decided = True
        faults.point("optimizer.begin")

    def applied(self) -> None:
        """An optimizer has stepped after the vote."""
        faults.point("optimizer.end")
        self._applied = True
        self._runtime.core.applied()

    # ---------------------------------------------------------------- StepDriver

    def enter(self, step: Step) -> None:
        self._step = step
        self._optimizers.begin_step(shadow=step.shadow)
        self._runtime.in_body = True

    def leave(self, step: Step, error: BaseException | None) -> bool:
        try:
            return self._leave(step, error)
        finally:
            self._optimizers.leave_body()
            self._runtime.in_body = False
            self._step = None

    def draw(self, step: Step, name: str | None) -> Any:
        return draw_from(self._tracked.loaders, name)

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        if error is None:
            self._optimizers.end_step()
            if step.shadow:
                return False
            try:
                self.vote()
            except StepDiscarded:
                self._discard()
                return False
            if not self._applied:
                self._runtime.core.applied()
            step.committed = True
            return False
        if step.shadow or not self._gives_up(error):
            return False
        if _left_backward(error):
            _end_torn(step, error, "an exception left backward while the step was being given up; DDP cannot go on after that")
        if self._decided and not self._applied:
            _end_torn(step, error, "an exception left an optimizer in the middle of a decided step")
        self._discard()
        return True

    def _gives_up(self, error: BaseException) -> bool:
        """True if the error only says that this attempt does not count; else it is the user's."""
        if isinstance(error, StepDiscarded):
            return True
        return isinstance(error, Exception) and self._runtime.core.dead() and not (self._decided and self._applied)

    def _discard(self) -> None:
        """From here on only code after the body runs, as if the step counted: the user updates averages, for one."""
        self._discarded = True
        self._tracked.keep_averages()
        self._optimizers.discard()
        self._runtime.discard()


def _left_backward(error: BaseException) -> bool:
    return any(frame.name == "_engine_run_backward" for frame in traceback.extract_tb(error.__traceback__))


def _end_torn(step: Step, error: BaseException, why: str) -> None:
    text = "".join(traceback.format_exception(error))
    end_process(EXIT_TORN, f"step {step.index}: {why}; this rank ends and will be replaced\n{text}")
