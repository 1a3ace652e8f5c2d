"""A rank's loop with its real core and real tracked state, and a fabric whose votes and links the test decides."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from torch.optim import Optimizer

from tmd.protocol.control import RankWelcome
from tmd.protocol.membership import Install, Member, Membership, Resolution
from tmd.protocol.rank import Directive, RankStatus
from tmd_worker.control import Control
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import RankCore
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.tcp import SERVICE, Tcp
from tmd_worker.installing import Installer
from tmd_worker.live import LiveLoop
from tmd_worker.optimizers import Optimizers
from tmd_worker.records import RecordShelf
from tmd_worker.runtime import Runtime
from tmd_worker.serving import StateServer
from tmd_worker.state.tracked import Tracked
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.ports import Handler
from tmd_worker.voting import CommitVote

TIMEOUT_S = 10.0

#: What one vote comes to: the combined ballot and whether ours was sent; None: yes.
Outcome = Callable[[Ballot], tuple[Ballot | None, bool]]


class FakeBuddy:
    """Keeps what is sent; the ward's records are always there."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, bytes]] = []
        #: What happens instead of the ward's next record.
        self.breaks: Callable[[], None] | None = None

    def send(self, kind: int, step: int, payload: bytes, *, epoch: int | None = None) -> None:
        self.sent.append((kind, step, payload))

    def wait_for(self, step: int, deadline_s: float) -> bool:
        if self.breaks is None:
            return True
        breaks, self.breaks = self.breaks, None
        breaks()
        return False


class FakeFabric:
    """Links that open at once and votes that the test decides."""

    def __init__(self) -> None:
        self.sandbox = False
        self.buddy = FakeBuddy()
        self.closed: list[int] = []
        self.live: list[int] = []
        self.outcomes: list[Outcome] = []
        self.ballots: list[Ballot] = []
        #: What this rank serves, and whom its connections reach.
        self.served: dict[str, Handler] = {}
        self.peer: FakeFabric | None = None

    def serve(self, kind: str, handler: Handler) -> None:
        self.served[kind] = handler

    def connect(self, member: Member, kind: str, fields: dict[str, Any], deadline_s: float) -> socket.socket:
        assert self.peer is not None, "the test has not said whom connections reach"
        ours, theirs = socket.socketpair()
        handler = self.peer.served[kind]

        def serve() -> None:
            with contextlib.suppress(OSError):  # as in the real one: the peer went away
                handler(theirs, fields)

        threading.Thread(target=serve, daemon=True).start()
        return ours

    def open(self, membership: Membership, rank: int, deadline_s: float) -> int:
        return len(membership.members) - 1

    def activate(self, epoch: int) -> int:
        self.live.append(epoch)
        return 0

    def close(self, epoch: int, reason: str) -> None:
        self.closed.append(epoch)

    def set_role(self, rank: int, world_size: int, nproc_per_node: int) -> None:
        pass

    def drop_staged(self, plan_id: int) -> None:
        pass

    def vote(self, ballot: Ballot, deadline_s: float) -> tuple[Ballot | None, bool]:
        self.ballots.append(ballot)
        return self.outcomes.pop(0)(ballot) if self.outcomes else (ballot, True)


class FakeControl:
    """Keeps the statuses."""

    def __init__(self) -> None:
        self.statuses: list[RankStatus] = []

    def send_status(self, status: RankStatus) -> None:
        self.statuses.append(status)

    def flush(self, timeout_s: float) -> bool:
        return True


class Rig:
    """One process of a job of two ranks, the rest of which is the test."""

    def __init__(self, incarnation: str = "a", rank: int | None = 0) -> None:
        welcome = RankWelcome(
            job_id="j",
            incarnation=incarnation,
            node="n0",
            host="127.0.0.1",
            rank=rank,
            local_rank=0,
            world_size=2,
            nproc_per_node=1,
            job_key=b"k" * 32,
            hold_limit_s=TIMEOUT_S,
            heartbeat_s=1.0,
        )
        self.core = RankCore(job_id="j", incarnation=incarnation, rank=rank, clock=time.time)
        self.control, self.fabric, self.tracked = FakeControl(), FakeFabric(), Tracked()
        self.tracked.set_role(rank or 0, 2)
        self.runtime = Runtime(self.core, cast(Control, self.control), welcome)
        fabric, own, inherited = cast(Fabric, self.fabric), RecordShelf(), RecordShelf()
        tcp = Tcp()
        self.fabric.serve(SERVICE, tcp.serve)
        transports = Transports([tcp])
        self.server = StateServer(self.runtime, fabric, self.tracked, own, inherited, transports)
        installer = Installer(self.runtime, fabric, self.tracked, own, inherited, lambda _: None, transports)
        self.runtime.attach(fabric, installer)
        self.optimizers = Optimizers(
            vote=lambda: self.loop.vote(),
            applied=lambda: self.loop.applied(),
            save=self.tracked.save_for_undo,
            late_backward=lambda: self.runtime.late_backward,
        )
        vote = CommitVote(self.runtime, fabric, self.tracked, own)
        self.loop = LiveLoop(self.runtime, fabric, self.tracked, self.optimizers, vote)
        self._order = Directive(
            job_id="j", incarnation=incarnation, generation=1, sequence=0, world_size=2, nproc_per_node=1, rank=rank
        )

    def track(self, *, undo: bool = False, **objects: Any) -> None:
        for name, obj in objects.items():
            self.tracked.add(name, obj, undo=undo)
            if isinstance(obj, Optimizer):
                self.optimizers.attach(name, obj, undo=undo)

    def order(self, **changes: Any) -> None:
        """The daemon wants something else."""
        self._order = msgspec.structs.replace(self._order, sequence=self._order.sequence + 1, **changes)
        self.runtime._on_directive(self._order)

    def table(self, epoch: int, incarnations: str) -> Membership:
        """Ranks 0 and 1 are held by these."""
        members = {r: Member(incarnation=incarnations[r], node=f"n{r}", host="127.0.0.1", port=1) for r in range(2)}
        return Membership(epoch=epoch, members=members)

    def install(self, epoch: int, target_step: int) -> None:
        """A new table, all links open, and the word to go on."""
        table = self.table(epoch, "ab")
        self.order(install=Install(membership=table, target_step=target_step, joining={}, fresh=epoch == 0))
        self.until(lambda: self.core.linked_epoch == epoch)
        self.order(live_epoch=epoch)

    def begin(self) -> None:
        """The job is live and its main has been entered."""
        self.runtime.tell(self.core.started, "127.0.0.1", 1)
        self.install(0, 0)
        self.runtime.tell(self.core.build_begins)

    def break_link(self) -> None:
        """The other rank is lost."""
        self.runtime.link_broken(self.core.live_epoch, 1, orderly=False, reason="test")

    def recover(self, target_step: int) -> None:
        """What the daemon does next, from a thread as it would; returns at once."""
        threading.Thread(target=self._recover, args=(target_step,), daemon=True).start()

    def _recover(self, target_step: int) -> None:
        epoch = self.core.poisoned_epoch
        self.until(lambda: self.core.reported_epoch >= epoch)
        self.order(poison_epoch=epoch, resolution=Resolution(epoch=epoch, target_step=target_step))
        self.install(epoch + 1, target_step)

    def until(self, condition: Callable[[], bool]) -> None:
        with self.runtime.changed:
            assert self.runtime.changed.wait_for(condition, TIMEOUT_S), "the condition did not come true"


def yes(ballot: Ballot) -> tuple[Ballot | None, bool]:
    return ballot, True
