"""One rank process around the real RankCore: what the shell does with the core's instructions, and with links, state, records.

The main thread is in `program`; this is everything else that a process does, and what happens to it from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulator.engine import Actor
from tests.simulator.handoff import Fetch, FromLeaver, FromSurvivors
from tests.simulator.links import End, Frame, Opening, Route, neighbours
from tests.simulator.model import TrainingState
from tests.simulator.program import MainThread
from tmd.protocol.agent import ProcessSpec
from tmd.protocol.membership import Install, Membership, Plan, buddy_of, ward_of
from tmd.protocol.rank import Directive, RankStatus, RecordOrigin
from tmd_worker.core import instructions as do
from tmd_worker.core.rank import RankCore

if TYPE_CHECKING:
    from tests.simulator.agent import SimAgent

EXIT_HOLD_LIMIT = 75
SIGKILL = -9


class SimRank(Actor):
    """A process of an agent. It lives until it exits, is killed, or its agent dies."""

    def __init__(self, agent: SimAgent, spec: ProcessSpec) -> None:
        super().__init__(agent.machine, spec.incarnation)
        self.agent = agent
        self.world = agent.world
        self.incarnation = spec.incarnation
        self.core: RankCore = self.world.cores.rank(
            job_id=self.world.job_id, incarnation=spec.incarnation, rank=spec.rank, clock=lambda: self.world.now
        )
        self.state: TrainingState | None = None
        #: Small state by step: what this rank was, and what its ward was, before that step.
        self.own_records: dict[int, int] = {}
        self.ward_records: dict[int, int] = {}
        #: It has loaded a state with small state that nobody could give exactly, and has not run with it yet.
        self.ends: list[End] = []
        self.live: dict[Route, End] = {}
        self.install: Install | None = None
        self.opening: Opening | None = None
        self.staging: Opening | None = None
        self.fetch: Fetch | None = None
        #: Joiners that wait for this process to freeze.
        self.subscribers: list[FromLeaver] = []
        self.last_status: RankStatus | None = None
        self.exit_code: int | None = None
        #: It takes no connections any more: it is out of descriptors.
        self.deaf = False
        #: A fault has hit this process, its agent or one of its links.
        self.touched_s = -1.0
        #: When it was last out of the daemon's reach.
        self.fenced_s = 0.0
        self._closed_epoch = -1
        self._held_since_s = 0.0
        self.main = MainThread(self)
        self.world.after(self.world.pace("start"), self, self.main.resume)
        self.world.after(self.world.settings.heartbeat_s, self, self.heartbeat)

    @property
    def rank(self) -> int | None:
        return self.core.rank

    # ---------------------------------------------------------------- instructions of the core

    def perform(self, out: list[do.Instruction]) -> None:
        for instruction in out:
            _HANDLERS[type(instruction)](self, instruction)
            if not self.alive:
                return
        if self.core.poisoned_epoch > self._closed_epoch:
            self._closed_epoch = self.core.poisoned_epoch
            self.world.checks.has_closed(self)
        if self.subscribers:
            for fetch in list(self.subscribers):
                fetch.look()

    def send_status(self, instruction: do.SendStatus) -> None:
        self.last_status = instruction.status
        self.world.checks.status_sent(self, instruction.status)
        self.agent.status_from(self, instruction.status)

    def close_links(self, instruction: do.CloseLinks) -> None:
        epoch = instruction.epoch
        self.world.checks.poisoned(self, epoch, instruction.reason)
        for end in self.ends:
            if end.epoch <= epoch:
                end.close(orderly=True)
        self.ends = [end for end in self.ends if not end.closed]
        for opening in (self.opening, self.staging):
            if opening is not None and opening.epoch <= epoch:
                opening.cancel()
        if self.fetch is not None and self.fetch.epoch <= epoch:
            self.fetch.cancel()
        self.world.switchboard.refuse_below(self, epoch)
        self.world.faults.point("poison", self)

    def open_links(self, instruction: do.OpenLinks) -> None:
        self._opens(instruction.membership, instruction.rank)
        self.world.faults.point("install", self)

    def _opens(self, members: Membership, rank: int) -> None:
        directive = self.order
        self.install = directive.install if directive is not None else None
        if self.install is not None and self.install.fresh:
            self.world.checks.starts_fresh(members.epoch)
        self.opening = Opening(self, members, self._routes(rank), "opening")
        self.world.switchboard.open(self.opening, self.world.link_deadline_s)

    def activate_links(self, instruction: do.ActivateLinks) -> None:
        opening = self.opening if self.opening is not None and self.opening.epoch == instruction.epoch else self.staging
        assert opening is not None
        self.world.checks.goes_live(self, opening.missing)
        self.live = opening.ends
        for end in self.live.values():
            end.use = "live"
        self.world.faults.point("go", self)

    def stage_links(self, instruction: do.StageLinks) -> None:
        plan = instruction.plan
        routes = self._routes(instruction.rank)
        if instruction.rank not in plan.leavers:
            routes = {route for route in routes if route[1] in plan.leavers}
        self.staging = Opening(self, plan.successor, routes, "staged")
        self.staged_plan = plan
        self.world.switchboard.open(self.staging, self.world.link_deadline_s)
        self.world.faults.point("stage", self)

    def drop_staged(self, instruction: do.DropStaged) -> None:
        if self.staging is not None and self.staged_plan.plan_id == instruction.plan_id:
            self.staging.cancel()
            self.staging = None
        if isinstance(self.fetch, FromLeaver) and self.fetch.plan.plan_id == instruction.plan_id:
            self.fetch.cancel()

    def switch_links(self, instruction: do.SwitchLinks) -> None:
        plan, epoch = instruction.plan, instruction.epoch
        self.world.checks.switched(self, plan)
        staged = self.staging.ends if self.staging is not None else {}
        self.live = {route: staged.get(route, end) for route, end in self.live.items()}
        for end in self.ends:
            if end.use == "live":
                if end.peer in plan.leavers:
                    end.use = "retiring"
                else:
                    end.epoch = epoch
        for end in staged.values():
            end.use = "live"
            if end.broken:
                self.link_ended(end, orderly=False)
        self.world.faults.point("switch", self)

    def retire_links(self, instruction: do.RetireLinks) -> None:
        for end in self.ends:
            if end.use == "retiring":
                end.close(orderly=True)
        self.ends = [end for end in self.ends if not end.closed]
        self.world.faults.point("retire", self)

    def take_role(self, instruction: do.TakeRole) -> None:
        self.state = None
        self.own_records.clear()
        self.ward_records.clear()

    def fetch_from_leaver(self, instruction: do.FetchFromLeaver) -> None:
        self.fetch = FromLeaver(self, instruction.plan, instruction.rank)

    def fetch_from_survivors(self, instruction: do.FetchFromSurvivors) -> None:
        self.fetch = FromSurvivors(self, instruction.install, instruction.rank)
        self.world.faults.point("fetch", self)

    def wake(self, instruction: do.Wake) -> None:
        self.main.wake()

    def exit(self, instruction: do.Exit) -> None:
        self.world.checks.retired(self)
        self.die(instruction.code)

    # ---------------------------------------------------------------- links

    def _routes(self, rank: int) -> set[Route]:
        return neighbours(rank, self.world.world_size, self.world.nproc_per_node)

    def frame_arrived(self, end: End) -> None:
        if end.inbox[-1].kind == "resync":
            self._ward_record_arrived(end.inbox.pop())
        else:
            self.main.frame_arrived(end)

    def link_ended(self, end: End, *, orderly: bool) -> None:
        """Seen by the thread that watches the link: by the time the core is told, the epoch may be over or have flipped."""
        if end.use == "staged":
            self.world.after(self.world.hop(), self, self._staged_link_ended, end, self.staged_plan.plan_id)
        elif end.use != "retiring":
            self.world.after(self.world.hop(), self, self._report_broken, end.epoch, end.peer, orderly)

    def _report_broken(self, epoch: int, peer: int, orderly: bool) -> None:
        self.perform(self.core.link_broken(epoch, peer, orderly=orderly, reason=f"link to rank {peer} closed"))

    def _staged_link_ended(self, end: End, plan_id: int) -> None:
        if end.use == "staged":
            self.perform(self.core.stage_failed(plan_id, f"staged link to rank {end.peer} closed"))

    def opening_done(self, opening: Opening) -> None:
        if opening.over:
            return
        if opening is self.staging:
            self.world.after(self.world.hop(), self, self._report_staged, self.staged_plan.plan_id, len(opening.ends))
        elif opening is self.opening:
            self.maybe_linked()

    def _report_staged(self, plan_id: int, opened: int) -> None:
        """From the thread that opened the links: by now the plan may be another."""
        self.perform(self.core.staged(plan_id, opened))
        self.world.faults.point("staged", self)

    def opening_failed(self, opening: Opening, reason: str, unreached: int = -1) -> None:
        opening.over = True
        if opening is self.staging:
            self.perform(self.core.stage_failed(self.staged_plan.plan_id, reason))
        elif opening is self.opening:
            self.perform(self.core.links_failed(opening.epoch, reason, unreached))

    # ---------------------------------------------------------------- records of small state

    def keep_record(self, shelf: dict[int, int], step: int, value: int) -> None:
        """Two generations are kept."""
        shelf[step] = value
        for old in [kept for kept in shelf if kept < step - 1]:
            del shelf[old]

    def maybe_linked(self) -> None:
        """The links of the installation are open and this rank stands at its boundary with the state of its role: its (perhaps
        new) buddy gets the record of it, then the core is told. To be called whenever one of these has come true."""
        install, opening = self.install, self.opening
        if install is None or opening is None or opening.missing or opening.over or opening.reported:
            return
        if not install.fresh:
            if not self.core.has_state or self.main.attempt is not None:
                return
            self._send_own_record(opening, install.target_step)
        opening.reported = True
        self.world.after(self.world.hop(), self, self._report_linked, opening.epoch, len(opening.ends))

    def _send_own_record(self, opening: Opening, step: int) -> None:
        rank, value = self.rank, self.own_records.get(step)
        if rank is not None and value is not None and self.core.may_hand_record():
            buddy = buddy_of(rank, self.world.world_size, self.world.nproc_per_node)
            opening.ends["buddy", buddy].send(Frame("resync", opening.epoch, step, rank, self.incarnation, value))

    def _report_linked(self, epoch: int, opened: int) -> None:
        """From the thread that opened the links: by now the epoch may be over."""
        self.perform(self.core.links_ready(epoch, opened))
        self.world.faults.point("linked", self)

    def _ward_record_arrived(self, frame: Frame) -> None:
        self.keep_record(self.ward_records, frame.step, frame.value)
        self.world.checks.record_kept(self, frame.epoch, frame.step)

    def state_arrived(self, epoch: int, state: TrainingState, origin: RecordOrigin) -> None:
        self.state = state
        self.keep_record(self.own_records, state.step, state.private)
        self.perform(self.core.state_loaded(epoch, state.step, origin))
        self.maybe_linked()

    @property
    def ward(self) -> int:
        assert self.rank is not None
        return ward_of(self.rank, self.world.world_size, self.world.nproc_per_node)

    # ---------------------------------------------------------------- from outside

    @property
    def order(self) -> Directive | None:
        return self._order

    _order: Directive | None = None
    staged_plan: Plan

    def on_directive(self, order: Directive) -> None:
        newest = self._order
        if newest is None or (order.generation, order.sequence) > (newest.generation, newest.sequence):
            self._order = order
        self.perform(self.core.on_directive(order))

    def peer_exiting(self, incarnation: str) -> None:
        self.perform(self.core.peer_exiting(incarnation))

    def heartbeat(self) -> None:
        self.world.after(self.world.settings.heartbeat_s, self, self.heartbeat)
        self.world.checks.still_wanted(self)
        opening = self.opening
        under_way = opening is not None and not opening.over and opening.epoch == self.core.install_epoch
        self.perform(self.core.heartbeat(opening.unreached() if opening is not None and under_way else -1))
        self._hold_or_leave()

    def _hold_or_leave(self) -> None:
        """Nobody waits for ever: with the daemon away a poisoned rank ends, so that Slurm can start the job again."""
        if self.core.phase != "holding":
            self._held_since_s = self.world.now
        elif self.world.now - self._held_since_s > 1.5 * self.world.settings.hold_limit_s:
            self.die(EXIT_HOLD_LIMIT)

    def die(self, code: int) -> None:
        """The process is gone: its links end after a moment, its agent learns of it in two steps."""
        if not self.alive:
            return
        self.alive = False
        self.exit_code = code
        self.world.note(self.name, f"exits with {code}")
        orderly = code == 0
        linger_s = self.world.pace("linger") if not orderly and self.world.random.random() < 0.5 else 0.0
        for end in self.ends:
            end.close(orderly=orderly, linger_s=linger_s)
        if self.fetch is not None:
            self.fetch.cancel()
        for fetch in self.subscribers:
            self.world.after(self.world.link_delay() + linger_s, fetch.joiner, fetch.source_lost)
        self.agent.process_exited(self)


_HANDLERS: dict[type, Callable[[SimRank, Any], None]] = {
    do.SendStatus: SimRank.send_status,
    do.CloseLinks: SimRank.close_links,
    do.OpenLinks: SimRank.open_links,
    do.ActivateLinks: SimRank.activate_links,
    do.StageLinks: SimRank.stage_links,
    do.DropStaged: SimRank.drop_staged,
    do.SwitchLinks: SimRank.switch_links,
    do.RetireLinks: SimRank.retire_links,
    do.TakeRole: SimRank.take_role,
    do.FetchFromLeaver: SimRank.fetch_from_leaver,
    do.FetchFromSurvivors: SimRank.fetch_from_survivors,
    do.Wake: SimRank.wake,
    do.Exit: SimRank.exit,
}
