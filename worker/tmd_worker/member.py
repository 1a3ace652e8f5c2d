"""A rank process under an agent: sets everything up, runs the user's main, and decides how the process ends.

Contract: the end of main ends the job only if every step is committed; an exception of the user's code is reported with its
traceback (exit code 1, the job ends); what fails only because an epoch is over holds for the daemon's word instead.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from tmd.protocol.codec import check_protocol
from tmd.protocol.control import RankWelcome
from tmd.protocol.exits import EXIT_TORN
from tmd_worker import faults, guard, mistakes
from tmd_worker.control import Control, Heart
from tmd_worker.core.rank import RankCore
from tmd_worker.discard import StepDiscarded
from tmd_worker.handoff import tls
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.rdma import Rdma
from tmd_worker.handoff.tcp import SERVICE, Tcp
from tmd_worker.installing import Installer
from tmd_worker.live import LiveLoop
from tmd_worker.optimizers import Optimizers
from tmd_worker.records import RecordShelf
from tmd_worker.runtime import Runtime
from tmd_worker.serving import StateServer, fetch_rehearsal
from tmd_worker.state.layout import layout, require_same
from tmd_worker.state.tracked import Tracked
from tmd_worker.step import Step
from tmd_worker.store import AgentStore
from tmd_worker.threads import end_process
from tmd_worker.transport import shell
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.listener import CannotListen
from tmd_worker.voting import CommitVote

Result = TypeVar("Result")

#: One attempt of a store request; the store repeats it while the daemon is away.
STORE_ATTEMPT_S = 5.0
#: How long the last words of a rank may take.
FAREWELL_S = 5.0


class MemberEngine:
    """One process of a job under tmd: a member, or a standby that may become one."""

    def __init__(self, control: Control, welcome: RankWelcome) -> None:
        self._control, self._welcome = control, welcome
        self._core = RankCore(job_id=welcome.job_id, incarnation=welcome.incarnation, rank=welcome.rank, clock=time.time)
        self._standby = welcome.rank is None
        self._runtime = Runtime(self._core, control, welcome)
        self._fabric = Fabric(
            host=welcome.host,
            job_key=welcome.job_key,
            incarnation=welcome.incarnation,
            events=self._runtime,
            port_range=welcome.port_range,
            transport=welcome.transport,
        )
        self._tracked = Tracked()
        own, inherited = RecordShelf(), RecordShelf()
        self._vote = CommitVote(self._runtime, self._fabric, self._tracked, own)
        tcp = Tcp(tls=tls.contexts(welcome.handoff))
        transports = Transports([Rdma(), tcp])
        if obstacle := transports.obstacle(welcome.handoff.transport):
            sys.exit(f"tmd: [handoff] transport is {welcome.handoff.transport} and cannot be used here: {obstacle}")
        self._fabric.serve(SERVICE, tcp.serve)
        self._server = StateServer(self._runtime, self._fabric, self._tracked, own, inherited, transports)
        installer = Installer(self._runtime, self._fabric, self._tracked, own, inherited, self._tell_role, transports)
        self._optimizers = Optimizers(
            vote=self.vote,
            applied=lambda: self._loop.applied(),
            save=self._tracked.save_for_undo,
            late_backward=lambda: self._runtime.late_backward,
        )
        self._loop = LiveLoop(self._runtime, self._fabric, self._tracked, self._optimizers, self._vote)
        self._on_role: list[Callable[[int], None]] = []
        self._runtime.attach(self._fabric, installer)
        faults.incarnation, faults.rank = welcome.incarnation, welcome.rank

    @classmethod
    def run(cls, control_fd: int, main: Callable[[MemberEngine], Result]) -> Result:
        """Runs `main` as this process's part of the job."""
        control = Control(socket.socket(fileno=control_fd))
        with guard.exempt():
            try:
                welcome = control.welcome()
                if reason := check_protocol(welcome.protocol):
                    sys.exit(f"tmd: between this rank and its agent: {reason}")
                engine = cls(control, welcome)
            except (CannotListen, tls.NoTls) as error:
                sys.exit(f"tmd: {error}")
            engine._join()
        return engine._run_main(main)

    # ---------------------------------------------------------------- the Engine of a session

    @property
    def rank(self) -> int:
        return self._welcome.world_size - 1 if self._core.rank is None else self._core.rank

    @property
    def local_rank(self) -> int:
        return self._welcome.local_rank

    @property
    def world_size(self) -> int:
        return self._welcome.world_size

    @property
    def live(self) -> bool:
        return not self._fabric.sandbox

    def track(self, name: str, obj: Any, *, undo: bool) -> None:
        self._tracked.add(name, obj, undo=undo)
        if isinstance(obj, torch.optim.Optimizer):
            self._optimizers.attach(name, obj, undo=undo)

    def untracked(self, obj: Any) -> None:
        self._tracked.excused.append(obj)

    def steps(self, total: int) -> Iterator[Step]:
        self._publish_build()
        yield from self._loop.warm_up(standby=self._standby)
        yield from self._loop.run(total)

    def _publish_build(self) -> None:
        """Standbys may rehearse this build. On a standby: raises StateMismatch if it is another one than was rehearsed."""
        recording, built = self._fabric.calls.stop_recording(), layout(self._tracked)
        if self._standby and recording.built:
            require_same(recording.built, built)
        recording.built = built
        self._server.publish(recording)

    def vote(self) -> None:
        self._loop.vote()

    def digest(self) -> dict[str, str]:
        return self._tracked.digest()

    def on_role(self, callback: Callable[[int], None]) -> None:
        self._on_role.append(callback)

    def log_only(self) -> AbstractContextManager[None]:
        return self._fabric.calls.log_only()

    # ---------------------------------------------------------------- begin

    def _join(self) -> None:
        """Listens, reports, and waits until the first links are open (a standby: until it knows the build's answers)."""
        welcome = self._welcome
        self._fabric.set_role(self.rank, welcome.world_size, welcome.nproc_per_node)
        self._tracked.set_role(self.rank, welcome.world_size)
        self._server.start()
        self._control.start(self._runtime.on_message)
        Heart(welcome.heartbeat_s, self._runtime.beat).start()
        self._runtime.tell(self._core.started, self._fabric.host, self._fabric.port)
        store: Store
        if self._standby:
            guard.activate(self.rank)
            self._fabric.sandbox = True
            self._fabric.calls.rehearsal = fetch_rehearsal(self._runtime, self._fabric)
            store = HashStore()
        else:
            self._runtime.await_live()
            self._fabric.calls.start_recording()
            store = AgentStore(
                lambda request: self._control.request(request, STORE_ATTEMPT_S),
                welcome.incarnation,
                away_limit_s=welcome.hold_limit_s,
            )
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.local_rank), WORLD_SIZE=str(self.world_size))
        shell.register()
        dist.init_process_group(
            "tmd",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=welcome.hold_limit_s),
        )

    def _tell_role(self, rank: int) -> None:
        for callback in self._on_role:
            callback(rank)

    # ---------------------------------------------------------------- end

    def _run_main(self, main: Callable[[MemberEngine], Result]) -> Result:
        self._runtime.tell(self._core.build_begins)
        try:
            result = main(self)
        except StepDiscarded:
            self._hold_for_restart()
        except SystemExit as ended:
            if self._core.phase != "finished":
                # Its last line is what the end of the job is told by.
                rule = f"main called sys.exit({ended.code!r}) before its last step: let the loop run to its end"
                self._end_failed(f"{traceback.format_exc()}{rule}\n")
            raise
        except Exception as error:
            mistake = mistakes.told(error)
            self._end_failed(mistake or traceback.format_exc())
            if mistake is None:
                raise
            sys.exit(mistake.rstrip())
        if self._core.phase != "finished":
            self._end_failed("main returned before its last step: let the loop over session.steps run to its end\n")
            sys.exit(1)
        self._control.flush(FAREWELL_S)
        atexit.register(gc.freeze)  # else the interpreter's last collections walk all of torch: a second of CPU in every rank
        return result

    def _end_failed(self, error: str) -> None:
        """The user's code raised. Returns once the daemon was told, unless the epoch was over: then it proves nothing."""
        if self._core.phase == "building" and not self._standby and self._runtime.called_off():
            print(f"tmd: main failed after this epoch had been called off:\n{error}", file=sys.stderr, flush=True)
            self._hold_for_restart()
        if self._runtime.giving_up():
            end_process(
                EXIT_TORN, f"code after `with step:` failed in a step that is given up; this rank will be replaced\n{error}"
            )
        self._runtime.tell(self._core.failed, error)
        self._control.flush(FAREWELL_S)

    def _hold_for_restart(self) -> NoReturn:
        """Half of a build cannot be taken back: the daemon ends this process and starts the job again."""
        self._runtime.hold_until_replaced("in an interrupted build")
