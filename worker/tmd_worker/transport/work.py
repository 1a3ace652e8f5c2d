"""One operation on its way: what PyTorch waits for, and how it ends.

Contract: every operation ends, and its future always gets a value, never an exception: DDP's reducer is broken by one.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future


class Outcome(enum.Enum):
    PENDING = enum.auto()
    #: The values are what the collective is for.
    DONE = enum.auto()
    #: The values are local ones, and that is in order (sandbox, inside autograd, log-only).
    LOCAL = enum.auto()
    #: Poisoned on the way: local values, and `wait` raises StepDiscarded where it may.
    DISCARDED = enum.auto()
    #: It could not be done and nothing is poisoned (peers that have left after the last step): `wait` raises.
    FAILED = enum.auto()


class TmdWork(Work):
    """`complaint` yields what `wait` on a discarded operation raises now, if anything (nothing inside autograd)."""

    def __init__(self, result: Any, complaint: Callable[[], BaseException | None], source: int = -1) -> None:
        super().__init__()
        #: Group rank of whoever sent what was received.
        self.source = source
        self._result = result
        self._complaint = complaint
        self._ended = threading.Event()
        self._future: Future[Any] = Future()
        self._failure = ""
        self.outcome = Outcome.PENDING

    def end(self, outcome: Outcome, failure: str = "") -> None:
        self.outcome = outcome
        self._failure = failure
        if not self._future.done():  # else a signal's handler has raised before the next line
            self._future.set_result(self._result)
        self._ended.set()

    def ended_within(self, timeout_s: float) -> bool:
        """Waits without raising anything."""
        return self._ended.wait(timeout_s)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises what the complaint is (StepDiscarded when poisoned outside autograd), RuntimeError on timeout or failure."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._ended.wait(seconds or None):
            raise RuntimeError(f"the collective was not complete after {seconds} s")
        if self.outcome is Outcome.DISCARDED:
            complaint = self._complaint()
            if complaint is not None:
                raise complaint
        if self.outcome is Outcome.FAILED:
            raise RuntimeError(self._failure)
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self.outcome in (Outcome.DONE, Outcome.LOCAL)

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


class Batch(Work):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[TmdWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Of each; raises what the first one raises."""
        for work in self._works:
            work.wait(timeout)
        return True

    def get_future(self) -> Future[Any]:
        """Its value is the list of all results."""
        whole: Future[Any] = torch.futures.collect_all([work.get_future() for work in self._works])
        return whole.then(lambda futures: [future.value() for future in futures.value()])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def result(self) -> Any:
        return [work.result() for work in self._works]


@dataclasses.dataclass(slots=True, eq=False)
class Operation:
    """A collective, a send or a receive that was called."""

    name: str
    #: What it writes.
    outputs: Sequence[Tensor]
    #: Writes valid values without any peer.
    local: Callable[[], None]
    work: TmdWork
    #: May follow the vote; its floats become NaN when it cannot be done.
    log_only: bool = False
    #: Under which its answer is recorded: a group's collectives, or what one received; and its position among them.
    series: str = ""
    index: int = -1

    def complete(self) -> None:
        self.work.end(Outcome.DONE)

    def complete_locally(self) -> None:
        """In sandbox, where local values are what is asked for."""
        with torch.no_grad():
            self.local()
        self.work.end(Outcome.LOCAL)

    def discard(self) -> None:
        """Poisoned on the way: local values, and whoever waits learns of it unless it is log-only."""
        self._write_substitute()
        self.work.end(Outcome.LOCAL if self.log_only else Outcome.DISCARDED)

    def discard_quietly(self) -> None:
        """Poisoned where nothing may be raised: local values."""
        self._write_substitute()
        self.work.end(Outcome.LOCAL)

    def fail(self, reason: str) -> None:
        """It cannot be done, and no step is discarded for it."""
        self._write_substitute()
        self.work.end(Outcome.FAILED, f"{self.name} on the tmd backend: {reason}")

    def _write_substitute(self) -> None:
        with torch.no_grad():
            self.local()
            if self.log_only:
                for tensor in self.outputs:
                    if tensor.dtype.is_floating_point:
                        tensor.fill_(torch.nan)
