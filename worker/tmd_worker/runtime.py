"""The shell around RankCore: one lock, its instructions carried out in order, and the waits of the main thread.

Contract: every event goes through `tell`, from whatever thread; instructions are performed under the lock, and what takes
time runs in a thread of its own that reports back as another event. A broken invariant ends the process (EXIT_BROKEN).
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, ParamSpec

from tmd.protocol.codec import MessageRefused
from tmd.protocol.control import PeerExiting, RankOrder, RankWelcome, ToRank
from tmd.protocol.exits import EXIT_BROKEN, EXIT_HELD, EXIT_THREAD
from tmd.protocol.rank import Directive
from tmd_worker import faults
from tmd_worker.control import Control
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.instructions import (
    ActivateLinks,
    CloseLinks,
    DropStaged,
    Exit,
    FetchFromLeaver,
    FetchFromSurvivors,
    Instruction,
    OpenLinks,
    RetireLinks,
    SendStatus,
    StageLinks,
    SwitchLinks,
    TakeRole,
    Wake,
)
from tmd_worker.core.rank import Admission, Boundary, BrokenInvariant, RankCore, Turn, Verdict
from tmd_worker.threads import end_process
from tmd_worker.transport.wire import Disagreement

if TYPE_CHECKING:
    from tmd_worker.installing import Installer
    from tmd_worker.transport.fabric import Fabric

P = ParamSpec("P")
#: How long a process that ends waits for its agent to take its last status.
LAST_WORDS_S = 1.0


class Runtime:
    """One rank process: its core, its links, its control socket."""

    def __init__(self, core: RankCore, control: Control, welcome: RankWelcome) -> None:
        self.core = core
        self.welcome = welcome
        self.changed = threading.Condition(threading.RLock())
        #: True while the body of a `with step:` runs: only there can StepDiscarded be caught.
        self.in_body = False
        #: A collective of a backward pass came after the vote of this step: it was not sent.
        self.late_backward = False
        self.order: Directive | None = None
        self._control = control
        self._fabric: Fabric
        self._installer: Installer
        self._word_s = time.monotonic()
        self._locked = _Locked(self)

    def attach(self, fabric: Fabric, installer: Installer) -> None:
        """The parts that need the runtime themselves. Before any event."""
        self._fabric, self._installer = fabric, installer

    # ---------------------------------------------------------------- events

    def tell(self, event: Callable[P, list[Instruction]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Passes one event to the core and carries out what it asks for."""
        with self._locked:
            self._perform(event(*args, **kwargs))

    def beat(self) -> None:
        """The heartbeat."""
        with self._locked:
            self._perform(self.core.heartbeat(self._fabric.unreached(self.core.install_epoch)))

    def on_message(self, message: ToRank) -> None:
        """From the control socket's reader."""
        if isinstance(message, RankOrder):
            self._on_directive(message.directive)
        elif isinstance(message, PeerExiting):
            self.tell(self.core.peer_exiting, message.incarnation)
        else:
            raise MessageRefused(f"the agent sent {type(message).__name__}, which only begins a rank's life")

    def _on_directive(self, order: Directive) -> None:
        with self._locked:
            if order.incarnation == self.core.incarnation:
                self._word_s = time.monotonic()
                self.order = order
            if order.install is not None:
                faults.point("install.received")
            if order.live_epoch > self.core.live_epoch:
                faults.point("go.received")
            self._perform(self.core.on_directive(order))

    # what the fabric reports (FabricEvents)

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        self.tell(self.core.link_broken, epoch, peer, orderly=orderly, reason=reason)

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        with self.changed:
            admission = self.core.admit(in_autograd=in_autograd, log_only=log_only)
            if admission is Admission.LOCAL and in_autograd and not self.core.dead():
                self.late_backward = True
            if admission is Admission.DISCARD and not self.in_body and self.core.run_epoch >= 0:
                return Admission.LOCAL  # between two bodies nobody could catch it; the next vote is refused anyway
            return admission

    def thread_died(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, Disagreement):
            # What the ranks' scripts call does not fit together: another process in this place would come to the same end.
            self._say_last_words(self.core.failed, text)
            end_process(1, f"the ranks' scripts do not fit together, so the job ends\n{text}")
        self._say_last_words(self.core.last_words, text)
        end_process(EXIT_THREAD, f"a thread of the links failed, so this rank ends and will be replaced\n{text}")

    def _say_last_words(self, event: Callable[[str], list[Instruction]], text: str) -> None:
        self.tell(event, text)
        self._control.flush(LAST_WORDS_S)

    # ---------------------------------------------------------------- the main thread

    def boundary(self) -> Boundary:
        """Waits at a step boundary for the leave to run the next step. Ends the process after hold_limit_s without word."""
        held_since_s = time.monotonic()
        with self._locked:
            while True:
                answer, instructions = self.core.boundary()
                self._perform(instructions)
                if answer.turn is Turn.RUN:
                    return answer
                if self.core.phase == "frozen":
                    faults.point("frozen")
                self.hold(held_since_s, "at a step boundary")

    def await_live(self) -> None:
        """A member waits for its first links before main is entered."""
        since_s = time.monotonic()
        with self.changed:
            while self.core.live_epoch < 0 or self.called_off():
                self.hold(since_s, "before the job's first links")

    def hold_until_replaced(self, where: str) -> NoReturn:
        """Nothing can be done here any more: the daemon will end this process."""
        since_s = time.monotonic()
        with self.changed:
            while True:
                self.hold(since_s, where)

    def called_off(self) -> bool:
        """The newest epoch that was allowed to run here is over."""
        return self.core.live_epoch <= self.core.poisoned_epoch

    def giving_up(self) -> bool:
        """The main thread is in a step that will not count."""
        return self.core.run_epoch >= 0 and self.core.dead() and self.core.verdict() is not Verdict.APPLY

    def begin_vote(self, *, last: bool) -> Ballot | None:
        with self._locked:
            return self.core.vote_begins(last=last)

    def end_vote(self, result: Ballot | None, *, sent: bool) -> Verdict:
        """Waits for the resolution if the vote's outcome is unknown."""
        held_since_s = time.monotonic()
        with self._locked:
            verdict, instructions = self.core.vote_ended(result, sent=sent)
            self._perform(instructions)
            if verdict is Verdict.BLOCK:
                faults.point("vote.unknown")
            while verdict is Verdict.BLOCK:
                self.hold(held_since_s, "with an undecided step")
                verdict = self.core.verdict()
            return verdict

    def discard(self) -> None:
        """The attempt that the main thread is in has been given up."""
        with self._locked:
            self.core.discarded()

    def hold(self, since_s: float, where: str) -> None:
        """One wait for anything to change; the lock is held. A standby without a role may wait for as long as its agent lives."""
        limit_s = self.welcome.hold_limit_s
        left_s = max(since_s, self._word_s) + limit_s - time.monotonic()
        if self.core.rank is None:
            left_s = limit_s
        elif left_s <= 0:
            end_process(
                EXIT_HELD,
                f"rank {self.core.rank} held {where} for {limit_s:.0f} s without word from the tmd daemon "
                f"({self.core.reason or 'no reason known'}); it ends with code {EXIT_HELD} so that the job can be requeued",
            )
        self.changed.notify_all()  # who asks for this rank's state must see that it has come to rest
        self.changed.wait(left_s)

    # ---------------------------------------------------------------- instructions

    def broke_an_invariant(self) -> None:
        """Only while a BrokenInvariant is handled."""
        end_process(
            EXIT_BROKEN,
            f"rank {self.core.rank} found an invariant broken, so it ends and will be replaced\n{traceback.format_exc()}",
        )

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._perform_one(instruction)

    def _perform_one(self, instruction: Instruction) -> None:
        match instruction:
            case SendStatus(status):
                self._control.send_status(status)
            case CloseLinks(epoch, reason):
                self._fabric.close(epoch, reason)
            case OpenLinks(membership, rank):
                self._installer.open(membership, rank)
            case ActivateLinks(epoch):
                self.core.count("survivor_links_reopened", self._fabric.activate(epoch))
            case StageLinks(plan, rank):
                self._installer.stage(plan, rank)
            case DropStaged(plan_id):
                self._installer.drop(plan_id)
                self._fabric.drop_staged(plan_id)
            case SwitchLinks(plan, epoch):
                faults.point("flip")
                self.core.count("stayer_links_reopened", self._fabric.switch(plan, epoch))
            case RetireLinks(epoch):
                self._fabric.retire(epoch)
            case TakeRole(rank):
                self._take_role(rank)
            case FetchFromLeaver(plan, rank):
                self._installer.fetch_from_leaver(plan, rank)
            case FetchFromSurvivors(install, rank):
                self._installer.fetch_from_survivors(install, rank)
            case Wake():
                pass  # every event wakes
            case Exit(code, reason):
                self._control.flush(LAST_WORDS_S)
                end_process(code, reason)

    def _take_role(self, rank: int) -> None:
        os.environ["RANK"] = str(rank)
        faults.rank = rank
        self._fabric.set_role(rank, self.welcome.world_size, self.welcome.nproc_per_node)
        faults.point("role.taken")


class _Locked:
    """The runtime's lock, for events: whoever waits for a change is woken at the end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._changed = runtime.changed

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None) -> None:
        try:
            if isinstance(error, BrokenInvariant):
                self._runtime.broke_an_invariant()
        finally:
            self._changed.notify_all()
            self._changed.release()
