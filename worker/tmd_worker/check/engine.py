"""What a session runs on under `tmd-run --check`: one process that builds and takes shadow steps as a standby would, and ends.

Contract: nothing leaves the process: collectives are answered locally, the guard is up. `run` ends with SystemExit, whose code
is 1 if there was an error; `on_report` was called before with everything found.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tmd_worker import guard
from tmd_worker.check import places
from tmd_worker.check.findings import Finding, count
from tmd_worker.check.untracked import Untracked
from tmd_worker.core.rank import Admission
from tmd_worker.optimizers import OptimizerRefused, Optimizers
from tmd_worker.session import Engine
from tmd_worker.state.errors import StateError, TrackRefused
from tmd_worker.state.tracked import Tracked
from tmd_worker.step import Step, StepMisused, draw_from
from tmd_worker.transport import shell
from tmd_worker.transport.fabric import Fabric
from tmd_worker.warmup import shadow_steps

Result = TypeVar("Result")

#: What tmd itself says no to; everything else is the script's own failure.
_REFUSALS = (StateError, OptimizerRefused, StepMisused, guard.SandboxRefused)


class Over(BaseException):
    """Leaves the user's main once the check knows enough."""


class _Rules:
    """What the fabric asks in a process without peers: every collective is answered here, by the rules of a live step."""

    def __init__(self) -> None:
        #: The vote of the step under way has been cast.
        self.voted = False
        #: A backward pass has called a collective since.
        self.late_backward = False

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        """There are no links."""

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        if self.voted and not in_autograd and not log_only:
            return Admission.AFTER_VOTE
        self.late_backward |= self.voted and in_autograd
        return Admission.SANDBOX

    def thread_died(self, error: BaseException) -> None:
        raise error


class CheckEngine:
    """Rank 0 of a job of `world_size` ranks that does not exist."""

    live = False
    rank = 0
    local_rank = 0

    def __init__(self, world_size: int, on_report: Callable[[list[Finding], int], None]) -> None:
        """`on_report(findings, shadow_steps)`."""
        self.world_size = world_size
        self._on_report = on_report
        self._tracked = Tracked()
        self._untracked = Untracked(self._tracked)
        self._rules = _Rules()
        self._optimizers = Optimizers(
            vote=self.vote, applied=lambda: None, save=lambda _: None, late_backward=lambda: self._rules.late_backward
        )
        self._findings: list[Finding] = []
        self._began = self._reported = False
        self._steps = 0

    # ---------------------------------------------------------------- the run

    def run(self, main: Callable[[Engine], Result]) -> Result:
        """Calls `main`. Raises SystemExit."""
        self._join()
        try:
            main(self)
        except Over:
            pass
        except _REFUSALS as error:
            self._refused(error)
        except SystemExit as error:
            self._failed(f"main called sys.exit({error.code!r}) before its shadow steps were over", error)
        except Exception as error:
            traceback.print_exc()
            self._failed(f"main raised {type(error).__name__}: {error}", error)
        if not self._reported:
            self._end_early()
        self._end()

    def _join(self) -> None:
        with guard.exempt():
            self._fabric = Fabric(host="127.0.0.1", job_key=bytes(32), incarnation="check", events=self._rules)
            self._fabric.set_role(self.rank, self.world_size, self.world_size)
            self._tracked.set_role(self.rank, self.world_size)
            shell.register()
            dist.init_process_group("tmd", store=HashStore(), rank=self.rank, world_size=self.world_size)

    def _refused(self, error: BaseException) -> None:
        self._findings.append(Finding(severity="error", kind="refused", what=str(error), where=_where(error)))

    def _failed(self, what: str, error: BaseException) -> None:
        self._findings.append(Finding(severity="error", kind="script", what=what, where=_where(error)))

    def _end_early(self) -> None:
        """`main` has ended, one way or the other, before the check was through."""
        if not self._began and not self._findings:
            what = "main returned without a loop over session.steps"
            self._findings.append(Finding(severity="error", kind="script", what=what, remedy="see docs/trainers.md"))
        elif not self._findings:
            what = "main left the loop over session.steps in a shadow step"
            self._findings.append(Finding(severity="error", kind="script", what=what, remedy="let the loop run to its end"))
        if self._began:
            self._untracked.steps_done()
        self._report(restored=False)

    def _report(self, *, restored: bool) -> None:
        self._reported = True
        if self._began:
            self._findings += self._untracked.findings(restored=restored, stepped=self._steps > 0)
        self._findings.sort(key=lambda finding: finding.severity)
        self._on_report(self._findings, self._steps)

    def _end(self) -> NoReturn:
        sys.exit(1 if count(self._findings, "error") else 0)

    # ---------------------------------------------------------------- the Engine of a session

    def track(self, name: str, obj: Any, *, undo: bool) -> None:
        self._tracked.add(name, obj, undo=undo)
        if isinstance(obj, torch.optim.Optimizer):
            self._optimizers.attach(name, obj, undo=undo)

    def untracked(self, obj: Any) -> None:
        self._tracked.excused.append(obj)

    def steps(self, total: int) -> Iterator[Step]:
        complete = self._check_complete()
        before = self._tracked.snapshot_all() if complete else None
        self._untracked.begin(sys._getframe())
        self._began = True
        for step in shadow_steps(self, self._untracked.watches):
            yield step
            self._steps += 1
        self._untracked.steps_done(sys._getframe())
        if before is not None:
            self._tracked.restore_all(before)
        self._report(restored=complete)
        raise Over

    def _check_complete(self) -> bool:
        try:
            self._tracked.check_complete()
        except TrackRefused as error:
            self._findings.append(Finding(severity="error", kind="refused", what=str(error)))
            return False
        return True

    def vote(self) -> None:
        self._rules.voted = True

    def digest(self) -> dict[str, str]:
        return self._tracked.digest()

    def on_role(self, callback: Callable[[int], None]) -> None:
        pass  # no role is ever taken

    def log_only(self) -> AbstractContextManager[None]:
        return self._fabric.calls.log_only()

    # ---------------------------------------------------------------- StepDriver

    def enter(self, step: Step) -> None:
        self._rules.voted = self._rules.late_backward = False
        self._optimizers.begin_step(shadow=False)

    def leave(self, step: Step, error: BaseException | None) -> bool:
        if error is None:
            self._optimizers.end_step()
            self.vote()
        self._optimizers.leave_body()
        return False

    def draw(self, step: Step, name: str | None) -> Any:
        return draw_from(self._tracked.loaders, name)


def _where(error: BaseException) -> str:
    """The innermost line of the user's code that the exception came through."""
    trace = error.__traceback__
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if places.is_users(file):
            found = places.place(file, trace.tb_lineno)
        trace = trace.tb_next
    return found
