"""What the core wants done in the background: links opened or staged, a role's state fetched, and the words back.

Contract: each task is a thread of its own that ends with exactly one event to the core; it gives up when its epoch is
poisoned or its plan dropped. A fetch of the state also ends when another begins, which waits for that (`fetching`). A joiner's
main thread holds at its boundary meanwhile, so nobody else touches the state.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

from tmd.protocol.handoff import HandoffReport
from tmd.protocol.membership import Install, Member, Membership, Plan
from tmd.protocol.rank import RecordOrigin
from tmd_worker import faults
from tmd_worker.drawing import Drawing
from tmd_worker.fetching import Fetch, Fetches, hang_up
from tmd_worker.handoff.agreement import Agreement, propose
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.tcp import SERVICE
from tmd_worker.records import RecordReply, RecordShelf
from tmd_worker.runtime import Runtime
from tmd_worker.serving import READY, STATE_TIMEOUT_S, WAITING
from tmd_worker.state.errors import StateError, TransferBroken
from tmd_worker.state.handoff import memory_of, receive_record
from tmd_worker.state.receiving import Origin, Received, Receiving
from tmd_worker.state.tracked import Tracked
from tmd_worker.threads import start_thread
from tmd_worker.transport.dialing import CannotConnect, Unreached
from tmd_worker.transport.fabric import Fabric, LinkError
from tmd_worker.transport.wire import Kind

#: How long staging the links of a plan may take: nobody's step is waited for, so another standby is tried soon. An epoch's links
#: are waited for until the daemon calls the epoch off, or hold_limit_s.
STAGING_TIMEOUT_S = 25.0
CONNECT_TIMEOUT_S = 10.0
#: How long a fetch that was stopped may take to end: it may be dialing, or preparing a large state's memory for its transport.
FETCH_END_S = 60.0

_log = logging.getLogger(__name__)


class Installer:
    """Starts the tasks. `on_role` is told a new role before its state is loaded."""

    def __init__(
        self,
        runtime: Runtime,
        fabric: Fabric,
        tracked: Tracked,
        own: RecordShelf,
        inherited: RecordShelf,
        on_role: Callable[[int], None],
        transports: Transports,
    ) -> None:
        self._runtime = runtime
        self._fabric = fabric
        self._tracked = tracked
        self._own = own
        self._inherited = inherited
        self._on_role = on_role
        self._transports = transports
        self._subscription: tuple[int, socket.socket] | None = None
        self._fetches = Fetches(FETCH_END_S)
        #: Plan -> set once its joiner here has agreed with the leaver on a transport, or will not.
        self._prepared: dict[int, threading.Event] = {}

    # ---------------------------------------------------------------- links

    def open(self, membership: Membership, rank: int) -> None:
        start_thread(f"open-{membership.epoch}", lambda: self._open(membership, rank))

    def stage(self, plan: Plan, rank: int) -> None:
        start_thread(f"stage-{plan.plan_id}", lambda: self._stage(plan, rank))

    def _open(self, membership: Membership, rank: int) -> None:
        core, epoch = self._runtime.core, membership.epoch
        try:
            opened = self._fabric.open(membership, rank, self._runtime.welcome.hold_limit_s)
            if core.phase != "starting":  # before main nobody has any state
                self._hand_record_to_buddy(epoch)
        except LinkError as error:
            _log.warning("rank %s: epoch %s: no links: %s", rank, epoch, error)
            self._runtime.tell(core.links_failed, epoch, str(error), error.peer if isinstance(error, Unreached) else -1)
        else:
            self._runtime.tell(core.links_ready, epoch, opened)

    def _hand_record_to_buddy(self, epoch: int) -> None:
        """The buddy may be new: it gets the record of the last step before anyone may go on. Raises LinkError."""
        reply = self._await_own_record(epoch)
        if not self._runtime.core.may_hand_record():
            return
        self._fabric.buddy.send(Kind.RECORD, reply.step, reply.record, epoch=epoch)
        self._fabric.buddy.send(Kind.TAIL, reply.step, reply.tail or b"", epoch=epoch)

    def _await_own_record(self, epoch: int) -> RecordReply:
        core = self._runtime.core
        deadline_s = time.monotonic() + self._runtime.welcome.hold_limit_s
        with self._runtime.changed:
            while True:
                reply = self._own.reply(core.next_step - 1)
                if core.poisoned_epoch >= epoch:
                    raise LinkError(f"epoch {epoch} was called off")
                if core.has_state and reply is not None and reply.tail is not None:
                    return reply
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(f"rank {core.rank} did not come to the end of its step")
                self._runtime.changed.wait(left_s)

    def _stage(self, plan: Plan, rank: int) -> None:
        core = self._runtime.core
        try:
            opened = self._fabric.stage(plan, rank, STAGING_TIMEOUT_S)
            if plan.successor.members[rank].incarnation == self._runtime.welcome.incarnation and rank in plan.leavers:
                self._await_prepared(plan.plan_id)
        except (LinkError, CannotConnect) as error:  # the links of now go on, whereas without any an epoch needs another process
            _log.warning("rank %s: plan %s: links not staged: %s", rank, plan.plan_id, error)
            self._runtime.tell(core.stage_failed, plan.plan_id, str(error))
        else:
            faults.point("staged")
            self._runtime.tell(core.staged, plan.plan_id, opened)

    def _await_prepared(self, plan_id: int) -> None:
        """Nobody flips before the joiner could read at once: agreeing on a transport is none of the pause. Raises LinkError."""
        if not self._prepared_of(plan_id).wait(STAGING_TIMEOUT_S):
            raise LinkError(f"plan {plan_id}: the leaver did not agree on a transport within {STAGING_TIMEOUT_S:.0f} s")

    def _prepared_of(self, plan_id: int) -> threading.Event:
        with self._runtime.changed:
            return self._prepared.setdefault(plan_id, threading.Event())

    # ---------------------------------------------------------------- state, unplanned

    def fetch_from_survivors(self, install: Install, rank: int) -> None:
        fetch = self._fetches.next()
        name = f"fetch-{install.membership.epoch}"
        start_thread(name, lambda: fetch.run(lambda: self._fetch_from_survivors(install, rank, fetch)))

    def _fetch_from_survivors(self, install: Install, rank: int, fetch: Fetch) -> None:
        core, epoch, step = self._runtime.core, install.membership.epoch, install.target_step
        faults.point("state.loading")
        with closing(Drawing(FETCH_END_S)) as drawing:
            try:
                fetch.take_over()
                self._take_tracked_role(rank)
                origin = self._load_from_survivors(install, rank, fetch, drawing)
            except (StateError, OSError) as error:
                self._report_no_state(epoch, rank, error)
                return
            faults.point("state.loaded")
            self._keep_own_record(step)
            self._runtime.tell(core.state_loaded, epoch, step, origin)

    def _load_from_survivors(self, install: Install, rank: int, fetch: Fetch, drawing: Drawing) -> RecordOrigin:
        """Tensors from every replica that is named, small state from the buddy."""
        source, members = install.joining[rank], install.membership.members
        step = install.target_step
        if source.replica_rank is None:
            raise TransferBroken(f"nobody holds the state of rank {rank}")
        fields = {"rank": rank, "step": step, "epoch": install.membership.epoch}
        receiving = Receiving(self._tracked, per_rank=False, step=step, received=self._received)
        with fetch.using(drawing.stop):
            for replica in (source.replica_rank, *source.other_replicas):
                origin = Origin(replica, members[replica].node)
                draw = functools.partial(self._draw, receiving, origin, members[replica], fields)
                drawing.start(origin, draw)
            taken = drawing.result()
        self._report(taken)
        record = tail = None
        if source.record_rank is not None:
            with (
                self._fabric.connect(members[source.record_rank], "record", fields, CONNECT_TIMEOUT_S) as sock,
                fetch.using(functools.partial(hang_up, sock)),
                Control(sock, STATE_TIMEOUT_S, self._received) as control,
            ):
                record, tail = receive_record(control, step - 1)
        return self._tracked.adopt_record(record, tail, taken.manifest)

    def _draw(self, receiving: Receiving, origin: Origin, replica: Member, fields: dict[str, int], fetch: Fetch) -> Received:
        step, epoch = fields["step"], fields["epoch"]
        with (
            self._fabric.connect(replica, "state", fields, CONNECT_TIMEOUT_S) as sock,
            fetch.using(functools.partial(hang_up, sock)),
            closing(self._agree(sock, replica)) as agreement,
            fetch.using(agreement.close),
        ):
            if not self._await_ready(sock, lambda: self._runtime.core.poisoned_epoch < epoch):
                raise TransferBroken(f"rank {origin.rank} will not come to the boundary before step {step}")
            with Control(sock, STATE_TIMEOUT_S, self._received) as control:
                return receiving.draw(origin, control, agreement)

    def _report_no_state(self, epoch: int, rank: int, error: Exception) -> None:
        _log.warning("rank %s: epoch %s: no state: %s", rank, epoch, error)
        self._runtime.tell(self._runtime.core.state_failed, epoch, str(error))

    # ---------------------------------------------------------------- state, planned

    def fetch_from_leaver(self, plan: Plan, rank: int) -> None:
        fetch = self._fetches.next()
        start_thread(f"subscribe-{plan.plan_id}", lambda: fetch.run(lambda: self._fetch_from_leaver(plan, rank, fetch)))

    def drop(self, plan_id: int) -> None:
        """The plan is off: its subscription ends."""
        if self._subscription is not None and self._subscription[0] == plan_id:
            hang_up(self._subscription[1])
            self._subscription = None

    def _fetch_from_leaver(self, plan: Plan, rank: int, fetch: Fetch) -> None:
        core, epoch = self._runtime.core, plan.successor.epoch
        try:
            fetch.take_over()
            self._take_tracked_role(rank)
            step = self._load_from_leaver(plan, rank, fetch)
        except (StateError, OSError) as error:
            self._report_no_state(epoch, rank, error)
            return
        finally:
            self._prepared_of(plan.plan_id).set()
        faults.point("state.loaded")
        self._keep_own_record(step)
        self._runtime.tell(core.state_loaded, epoch, step, "exact")

    def _load_from_leaver(self, plan: Plan, rank: int, fetch: Fetch) -> int:
        """Waits for the flip, then takes the leaver's whole state and its ward's record. Returns the step to run first."""
        leaver = plan.sources.get(rank)
        if leaver is None:
            raise TransferBroken(f"plan {plan.plan_id} does not say where rank {rank} listens")
        with (
            self._fabric.connect(leaver, "leaver", {"plan": plan.plan_id}, CONNECT_TIMEOUT_S) as sock,
            fetch.using(functools.partial(hang_up, sock)),
        ):
            with self._runtime.changed:
                self._subscription = (plan.plan_id, sock)
            with closing(self._agree(sock, leaver)) as agreement, fetch.using(agreement.close):
                self._prepared_of(plan.plan_id).set()
                if not self._await_ready(sock, lambda: True):
                    raise TransferBroken(f"the leaver called plan {plan.plan_id} off before its flip")
                faults.point("state.loading")
                with Control(sock, STATE_TIMEOUT_S, self._received) as control:
                    receiving = Receiving(self._tracked, per_rank=True, received=self._received)
                    taken = receiving.draw(Origin(rank, leaver.node), control, agreement)
                    record, tail = receive_record(control, taken.manifest.step - 1)
        self._report(taken)
        manifest = taken.manifest
        if record is not None:
            self._inherited.put(manifest.step - 1, record)
            if tail is not None:
                self._inherited.put_tail(manifest.step - 1, tail)
        return manifest.step

    def _await_ready(self, sock: socket.socket, wanted: Callable[[], bool]) -> bool:
        """For as long as the source says that it lives. False: it has hung up, or the state is not wanted any more."""
        sock.settimeout(STATE_TIMEOUT_S)
        word = WAITING
        while word == WAITING and wanted():
            word = sock.recv(1)
        return word == READY

    def _agree(self, sock: socket.socket, source: Member) -> Agreement:
        """Before the source stands still. Raises OSError."""
        with Control(sock, STATE_TIMEOUT_S, self._received) as control:
            dial = functools.partial(self._fabric.connect, source, SERVICE)
            memory = memory_of(self._tracked.in_reach())
            mode = self._runtime.welcome.handoff.transport
            return propose(control, self._transports, mode, dial, memory, CONNECT_TIMEOUT_S)

    def _report(self, taken: Received) -> None:
        """The next status tells how the state came."""
        report = HandoffReport(
            transport=taken.transport,
            why=taken.why,
            source=", ".join(dict.fromkeys(f"rank {source.rank} on {source.node}" for source in taken.sources)),
            bytes_by_transport=taken.bytes_by_transport,
            parts_s=taken.parts_s,
            sources=taken.sources,
        )
        with self._runtime.changed:
            self._runtime.core.handoff = report

    def _received(self, size_bytes: int) -> None:
        with self._runtime.changed:
            self._runtime.core.count("state_bytes", size_bytes)

    # ---------------------------------------------------------------- the role

    def _take_tracked_role(self, rank: int) -> None:
        self._tracked.set_role(rank, self._runtime.welcome.world_size)
        self._on_role(rank)

    def _keep_own_record(self, step: int) -> None:
        record = self._tracked.record(step - 1)
        with self._runtime.changed:
            self._own.put(step - 1, record)
            self._own.put_tail(step - 1, b"")
