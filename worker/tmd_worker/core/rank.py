"""The rank's state machine: step, vote, poison, flip, fence, relink, recovery (docs/protocol.md draws it).

Contract: every public method is one event; it changes the state and returns instructions for the shell, in order. The
caller serialises the calls (one lock) and injects the clock. Nothing here blocks, and nothing here does I/O.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable

from tmd.protocol.membership import Membership, Plan
from tmd.protocol.rank import Commit, Directive, Phase, RankStatus, RecordOrigin
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

#: How many commits a status carries.
COMMITS_KEPT = 64


class BrokenInvariant(RuntimeError):
    """Two ranks disagree about what was decided. The process must end: going on could make states diverge."""


class Admission(enum.Enum):
    """What becomes of a collective that the user's code calls now."""

    #: Send it.
    PROCEED = enum.auto()
    #: Shadow step: local, with valid values.
    SANDBOX = enum.auto()
    #: Poisoned, inside autograd: complete locally with valid values.
    LOCAL = enum.auto()
    #: Poisoned, outside autograd: raise StepDiscarded.
    DISCARD = enum.auto()
    #: After the yes: it could fail on some ranks only, so it is refused.
    AFTER_VOTE = enum.auto()


class Turn(enum.Enum):
    """What the main thread does at a step boundary."""

    RUN = enum.auto()
    #: Nothing yet: ask again after Wake.
    WAIT = enum.auto()


class Verdict(enum.Enum):
    """What the vote means for this rank."""

    APPLY = enum.auto()
    DISCARD = enum.auto()
    #: Unknown: block with the gradients untouched, ask `verdict` again after Wake.
    BLOCK = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The answer at a step boundary: `step` in `epoch`; `rollback` if the attempt before was discarded."""

    turn: Turn
    step: int = 0
    epoch: int = -1
    rollback: bool = False


@dataclasses.dataclass(slots=True)
class _Vote:
    """A vote in progress or undecided."""

    epoch: int
    plan: Plan | None
    #: The plan was called off while this vote was under way.
    drop_after: bool = False


class RankCore:
    """One incarnation of a rank. See the module's contract."""

    def __init__(self, *, job_id: str, incarnation: str, rank: int | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._order: Directive | None = None
        self._out: list[Instruction] = []
        self._dirty = False
        self._version = 0
        #: Who has a role from the start builds with live links; a standby builds in sandbox.
        self._builds_live = rank is not None
        self._members: Membership | None = None
        self.job_id = job_id
        self.incarnation = incarnation
        self.rank = rank
        self.host = ""
        self.port = 0
        self.phase: Phase = "starting"
        self.run_epoch = -1
        self.live_epoch = -1
        self.poisoned_epoch = -1
        self.next_step = 0
        self.applied_step = 0
        self.unknown = False
        self.reported_epoch = -1
        self.resolved_epoch = -1
        self.linked_epoch = -1
        self.failed_epoch = -1
        self.committed_epoch = -1
        self.has_state = False
        self.record_origin: RecordOrigin = ""
        self.broken_ranks: set[int] = set()
        self.reason = ""
        self.error = ""
        self.stamps: dict[str, float] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self._commits: collections.deque[Commit] = collections.deque(maxlen=COMMITS_KEPT)
        self._install_epoch = -1
        self._links_done = False
        self._state_done = False
        self._plan: Plan | None = None
        self._armed = False
        self._staged_plan = 0
        self._dropped_plan = 0
        self._flipped_plan = 0
        self._flip: Plan | None = None
        self._retire_epoch = -1
        #: The ranks that the last flip replaced: links of epochs before it to them are not watched.
        self._left: frozenset[int] = frozenset()
        self._frozen = False
        self._vote: _Vote | None = None
        self._voting = False
        self._yes = False
        self._discarded = False
        self._at_boundary = False
        self._finished = False

    # ---------------------------------------------------------------- life of the process

    def started(self, host: str, port: int) -> list[Instruction]:
        """The listener is up."""
        self.host, self.port = host, port
        return self._changed()

    def build_begins(self) -> list[Instruction]:
        """The script's main is entered."""
        self.phase = "building"
        return self._changed()

    def warm_up_begins(self) -> list[Instruction]:
        """Main has reached its first step; shadow steps follow."""
        self.phase = "warming"
        return self._changed()

    def warm_up_ended(self) -> list[Instruction]:
        """State is as it was after the build. Who built live holds the state of its role: it has just made it."""
        if self._builds_live and self.live_epoch >= 0:
            self.has_state = True
            self.phase = "holding" if self.live_epoch <= self.poisoned_epoch else "running"
        else:
            self.phase = "ready"
        return self._changed()

    def finished(self) -> list[Instruction]:
        """The last vote (after the last step) said yes: every rank has applied everything."""
        self._finished = True
        self.phase = "finished"
        return self._changed()

    def failed(self, error: str) -> list[Instruction]:
        """The user's code raised while nothing was poisoned."""
        self.phase = "failed"
        self.error = error[-16_384:]
        return self._changed()

    def count(self, name: str, number: int) -> None:
        """The shell has counted something that is worth showing; the next status tells it."""
        self.counters[name] += number

    def heartbeat(self) -> list[Instruction]:
        """Time to tell the daemon that all is well, and to look again at what it wants."""
        if self._order is not None and not self._finished:
            self._reconsider(self._order)
        return self._changed()

    # ---------------------------------------------------------------- what the daemon wants

    def on_directive(self, order: Directive) -> list[Instruction]:
        """Compare what the daemon wants with what is, and do the difference. Old, repeated and foreign ones do nothing."""
        newest = self._order
        if order.incarnation != self.incarnation:
            return []
        if newest is not None and (order.generation, order.sequence) <= (newest.generation, newest.sequence):
            return []
        self._order = order
        if order.retired:
            return [*self._changed(), Exit(0, "replaced: another incarnation has this role now")]
        if self._finished:
            return []
        self._reconsider(order)
        return self._changed()

    def _reconsider(self, order: Directive) -> None:
        """Idempotent: every part acts only on what is not done yet."""
        self._poison(order.poison_epoch, "the daemon called the epoch off")
        if self._plan is not None and (order.plan is None or order.plan.plan_id != self._plan.plan_id):
            self._drop_plan()
        self._consider_role(order)
        self._consider_resolution(order)
        self._consider_install(order)
        self._consider_go(order)
        self._consider_plan(order)

    def _consider_role(self, order: Directive) -> None:
        rank = order.rank
        if rank is None and self._plan is not None:
            return  # a joiner keeps the role of its plan for as long as the plan stands
        if rank == self.rank:
            return
        if self.run_epoch >= 0 or self.has_state:
            if rank is not None:
                self.reason = f"told to become rank {rank} while holding the state of rank {self.rank}"
            return
        self._take_role(rank)

    def _take_role(self, rank: int | None) -> None:
        if rank == self.rank:
            return
        self.rank = rank
        if rank is not None:
            self._out.append(TakeRole(rank))

    def _consider_plan(self, order: Directive) -> None:
        plan = order.plan
        if plan is None or plan.plan_id <= max(self._dropped_plan, self._flipped_plan):
            return
        if self._plan is not None and self._plan.plan_id != plan.plan_id:
            return  # the older one is still in the vote under way
        joiner_rank = plan.successor.rank_of(self.incarnation)
        joins = joiner_rank is not None and joiner_rank in plan.leavers
        if plan.base_epoch <= self.poisoned_epoch or (not joins and plan.base_epoch != self.live_epoch):
            return
        if self._plan is None:
            self._plan = plan
            if joins and joiner_rank is not None:
                self.has_state = False
                self._take_role(joiner_rank)
                self._out.append(StageLinks(plan, joiner_rank))
                self._out.append(FetchFromLeaver(plan, joiner_rank))
            elif self.rank is not None and not self._leaves(plan):
                self._out.append(StageLinks(plan, self.rank))
            else:
                self._staged_plan = plan.plan_id
        self._armed = order.armed and self._leaves(plan)

    def _consider_resolution(self, order: Directive) -> None:
        resolution = order.resolution
        if resolution is None or resolution.epoch <= self.resolved_epoch or self.reported_epoch < resolution.epoch:
            return
        if self.run_epoch > resolution.epoch or self._frozen:
            return  # it speaks of epochs that this rank had no part in
        self.resolved_epoch = resolution.epoch
        if self.unknown and self.next_step == resolution.target_step - 1:
            self._decide(self._vote.epoch if self._vote else self.run_epoch)
            self._yes = True
        elif self.next_step != resolution.target_step and self.has_state:
            raise BrokenInvariant(
                f"rank {self.rank} is at step {self.next_step} (unknown={self.unknown}), resolved was {resolution.target_step}"
            )
        self.unknown = False
        self._out.append(Wake())

    def _consider_install(self, order: Directive) -> None:
        install = order.install
        if install is None or self.rank is None:
            return
        epoch = install.membership.epoch
        if epoch <= max(self._install_epoch, self.poisoned_epoch, self.live_epoch):
            return
        if install.membership.rank_of(self.incarnation) != self.rank or self._voting or self.unknown:
            return
        self._install_epoch, self._members = epoch, install.membership
        self._links_done = False
        arrived = install.fresh or (self._holds_state() and self.next_step == install.target_step)
        if not arrived and self.rank not in install.joining:
            where = f"at step {self.next_step}" if self._holds_state() else "without state"
            raise BrokenInvariant(f"rank {self.rank} is {where}, the install says {install.target_step}")
        # Who loaded for an installation before this one has arrived, whether the daemon knew or not: nobody ran meanwhile.
        self._state_done = arrived
        self.stamps["install"] = self._clock()
        self._out.append(OpenLinks(install.membership, self.rank))
        if not arrived:
            self._out.append(FetchFromSurvivors(install, self.rank))

    def _holds_state(self) -> bool:
        """That of its role; also from the end of a live build on, though only the end of the warm-up says so to others."""
        return self.has_state or (self._builds_live and self.live_epoch >= 0)

    def _consider_go(self, order: Directive) -> None:
        epoch = order.live_epoch
        if epoch <= max(self.live_epoch, self.poisoned_epoch) or epoch != self._install_epoch:
            return
        if epoch == self.failed_epoch:
            self.live_epoch = epoch
            self._poison(epoch, "a link broke between the installation and the word to go on")
        elif epoch == self.linked_epoch:
            self.live_epoch = epoch
            self._frozen = False
            self.broken_ranks.clear()
            self.reason = ""
            self.stamps["go"] = self._clock()
            self._out += [ActivateLinks(epoch), Wake()]

    # ---------------------------------------------------------------- links and state, as the shell reports them

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> list[Instruction]:
        """A link of a group closed. `orderly`: the peer sent STOP first, so it lives and is poisoned itself.

        A link kept over a flip may still be reported under the epoch before: that breaks the live one. Only links to
        the leavers may close then. A frozen leaver takes part in nothing: the others close their links to it when they
        are done with it.
        """
        if self._finished or epoch <= self.poisoned_epoch:
            return []
        if epoch < self.live_epoch and peer in self._left:
            return []
        if self._frozen and epoch <= self.live_epoch:
            return []
        if not orderly:
            self.broken_ranks.add(peer)
        if epoch <= self.live_epoch:
            self._poison(self.live_epoch, reason)
        elif epoch == self._install_epoch:
            self.failed_epoch = epoch
            self.reason = reason
        elif self._plan is not None and epoch == self._plan.successor.epoch:
            self.reason = reason
            self._drop_plan()
        return self._changed()

    def peer_exiting(self, incarnation: str) -> list[Instruction]:
        """The agent sees that a process of this node is dying."""
        members = self._members
        rank = members.rank_of(incarnation) if members is not None else None
        if members is None or rank is None or rank == self.rank:
            return []
        return self.link_broken(members.epoch, rank, orderly=False, reason=f"rank {rank} is exiting")

    def links_ready(self, epoch: int, opened: int) -> list[Instruction]:
        self.counters["links_opened"] += opened
        return self._part_installed(epoch, links=True)

    def links_failed(self, epoch: int, reason: str) -> list[Instruction]:
        return self._install_failed(epoch, reason)

    def state_loaded(self, epoch: int, step: int, origin: RecordOrigin) -> list[Instruction]:
        """The joiner holds the state of its role as it is before `step`, for the installation of `epoch`."""
        plan = self._plan
        planned = plan is not None and epoch == plan.successor.epoch
        if epoch <= self.poisoned_epoch or not (planned or epoch == self._install_epoch):
            return []
        self.record_origin = origin
        self.has_state = True
        self.next_step = self.applied_step = step
        self.stamps["state"] = self._clock()
        if plan is not None and planned:
            self._flipped_plan = plan.plan_id
            self.linked_epoch = self.live_epoch = epoch
            self._install_epoch = max(self._install_epoch, epoch)
            self._members = plan.successor
            self._forget_plan()
            self._out += [ActivateLinks(epoch), Wake()]
            return self._changed()
        return self._part_installed(epoch, links=False)

    def state_failed(self, epoch: int, reason: str) -> list[Instruction]:
        """The state could not be had. In a plan the joiner steps back; if the flip has happened the daemon recovers."""
        plan = self._plan
        if plan is not None and epoch == plan.successor.epoch and epoch > self.poisoned_epoch:
            self.failed_epoch = epoch
            self.reason = reason
            self._drop_plan()
            return self._changed()
        return self._install_failed(epoch, reason)

    def staged(self, plan_id: int, opened: int) -> list[Instruction]:
        self.counters["links_opened"] += opened
        if self._plan is not None and self._plan.plan_id == plan_id:
            self._staged_plan = plan_id
            self.stamps["staged"] = self._clock()
        return self._changed()

    def stage_failed(self, plan_id: int, reason: str) -> list[Instruction]:
        if self._plan is not None and self._plan.plan_id == plan_id:
            self.reason = reason
            self._drop_plan()
        return self._changed()

    def _part_installed(self, epoch: int, *, links: bool) -> list[Instruction]:
        if epoch != self._install_epoch or epoch <= self.poisoned_epoch:
            return []
        if links:
            self._links_done = True
        else:
            self._state_done = True
        if self._links_done and self._state_done and self.failed_epoch < epoch:
            self.linked_epoch = epoch
            self.stamps["linked"] = self._clock()
        return self._changed()

    def _install_failed(self, epoch: int, reason: str) -> list[Instruction]:
        if epoch != self._install_epoch or epoch <= self.poisoned_epoch:
            return []
        self.failed_epoch = epoch
        self.reason = reason
        return self._changed()

    # ---------------------------------------------------------------- poison

    def dead(self) -> bool:
        """The attempt that the main thread is in will not count."""
        return self.run_epoch <= self.poisoned_epoch

    def _poison(self, epoch: int, reason: str) -> None:
        if epoch <= self.poisoned_epoch or self._finished:
            return
        self.poisoned_epoch = epoch
        self.reason = reason
        self.stamps["poisoned"] = self._clock()
        if self._flip is not None and self._flip.base_epoch <= epoch:
            self._flip = None
        if self._plan is not None and self._plan.base_epoch <= epoch:
            self._drop_plan(at_once=True)
        self._out += [CloseLinks(epoch, reason), Wake()]
        if self.phase == "running" and self.dead():
            self.phase = "holding"
        if not self._voting:
            self.reported_epoch = epoch

    # ---------------------------------------------------------------- plan

    def _leaves(self, plan: Plan) -> bool:
        return self.rank is not None and plan.leavers.get(self.rank) == self.incarnation

    def _drop_plan(self, *, at_once: bool = False) -> None:
        """The plan is off, unless the vote that is under way carries it (its end decides) or has decided the flip."""
        plan = self._plan
        if plan is None or self._flip is plan:
            return
        if self._voting and not at_once and self._vote is not None and self._vote.plan is plan:
            self._vote.drop_after = True
            return
        self._dropped_plan = max(self._dropped_plan, plan.plan_id)
        self._out.append(DropStaged(plan.plan_id))
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._plan = None
        self._armed = False
        self._staged_plan = 0

    # ---------------------------------------------------------------- the step

    def boundary(self) -> tuple[Boundary, list[Instruction]]:
        """The main thread stands between two steps, with everything before `next_step` applied and its tail done."""
        if self.has_state and self.applied_step != self.next_step:
            raise BrokenInvariant(f"at a boundary with step {self.next_step} decided and {self.applied_step} applied")
        self._yes = False
        if self.dead() and not self._at_boundary:
            self._changed_later()  # whoever waits for this rank's state need wait no longer
        self._at_boundary = True
        if self._flip is not None and not self.dead():
            self._perform_flip(self._flip)
        if not self.has_state or self._frozen:
            return Boundary(Turn.WAIT), self._take()
        if self.run_epoch < 0 or self.dead():
            if self.live_epoch <= max(self.poisoned_epoch, self.run_epoch):
                return Boundary(Turn.WAIT), self._take()
            self.run_epoch = self.live_epoch
        if self.phase != "running":
            self.phase = "running"
            self._changed_later()
        self._at_boundary = False
        rollback, self._discarded = self._discarded, False
        return Boundary(Turn.RUN, self.next_step, self.run_epoch, rollback), self._take()

    def _perform_flip(self, plan: Plan) -> None:
        self._flip = None
        self.stamps["flip"] = self._clock()
        self._flipped_plan = plan.plan_id
        if self._leaves(plan):
            self._frozen = True
            self.phase = "frozen"
        else:
            epoch = plan.successor.epoch
            self.live_epoch = self.run_epoch = self.linked_epoch = epoch
            self._install_epoch = max(self._install_epoch, epoch)
            self._retire_epoch = epoch
            self._left = frozenset(plan.leavers)
            self._members = plan.successor
            self._out.append(SwitchLinks(plan, epoch))
        self._forget_plan()
        self._changed_later()

    def discarded(self) -> None:
        """The attempt was given up; the next boundary rolls back."""
        self._discarded = True
        self.counters["steps_redone"] += 1

    def admit(self, *, in_autograd: bool, log_only: bool = False) -> Admission:
        """What becomes of a collective called now (the shell answers SANDBOX itself during shadow steps)."""
        if self._finished:
            return Admission.PROCEED
        if self.run_epoch < 0 and self.live_epoch < 0:
            return Admission.SANDBOX
        epoch = self.run_epoch if self.run_epoch >= 0 else self.live_epoch
        poisoned = epoch <= self.poisoned_epoch
        if self._yes and not log_only:
            return Admission.LOCAL if in_autograd else Admission.AFTER_VOTE
        if poisoned:
            return Admission.LOCAL if in_autograd or log_only else Admission.DISCARD
        return Admission.PROCEED

    def vote_begins(self, *, last: bool = False) -> Ballot | None:
        """The ballot to send, or None: poisoned, the attempt is over. `last`: the vote after the last step."""
        if self.dead():
            return None
        plan = self._plan if self._plan is not None and self._plan.base_epoch == self.run_epoch and not last else None
        self._voting = True
        self._vote = _Vote(self.run_epoch, plan)
        return Ballot.single(
            epoch=self.run_epoch,
            step=self.next_step,
            plan=plan.plan_id if plan else 0,
            staged=bool(plan and self._staged_plan == plan.plan_id),
            ready=bool(plan and self._armed),
        )

    def vote_ended(self, result: Ballot | None, *, sent: bool) -> tuple[Verdict, list[Instruction]]:
        """`result` None: the vote broke; `sent`: a frame of this rank's ballot may have left."""
        vote = self._vote
        if not self._voting or vote is None:
            raise BrokenInvariant("a vote ended that had not begun")
        self._voting = False
        if result is not None:
            self._accept(result, vote)
        elif sent:
            self.unknown = True
        if vote.drop_after and self._flip is None and self._plan is vote.plan:
            self._drop_plan(at_once=True)
        if self.dead():
            self.reported_epoch = max(self.reported_epoch, self.poisoned_epoch)
        elif result is None:
            raise BrokenInvariant("a vote broke and nothing is poisoned")
        if result is not None:
            self._yes = True
            return Verdict.APPLY, self._changed() if self.dead() else self._take()
        return (Verdict.BLOCK if sent else Verdict.DISCARD), self._changed()

    def verdict(self) -> Verdict:
        """Asked again after BLOCK: the resolution has decided, or not yet."""
        if self.unknown:
            return Verdict.BLOCK
        return Verdict.APPLY if self._yes else Verdict.DISCARD

    def applied(self) -> None:
        """The optimizer has stepped (or the step ended without one): the decided step is in the state."""
        self.applied_step = self.next_step

    def may_serve(self, *, step: int) -> bool | None:
        """May this rank's state be given to a joiner of `step`? None: not yet, False: never.

        Ask again after copying: True then says that nothing changed meanwhile.
        """
        if self.next_step > step or self.live_epoch > self.poisoned_epoch:
            return False
        if not self.has_state or not self._at_boundary or self.next_step < step:
            return None
        return self.applied_step == step

    def leaver_step(self, plan_id: int) -> int | None:
        """On the leaver: the step that the joiner runs first, once frozen by this plan. None: not yet.

        Raises LookupError when this plan will never flip here.
        """
        if self._flipped_plan == plan_id and self._frozen:
            return self.next_step
        if self._dropped_plan >= plan_id or self._flipped_plan >= plan_id:
            raise LookupError(f"plan {plan_id} is off")
        return None

    def _accept(self, result: Ballot, vote: _Vote) -> None:
        if not result.agrees() or result.step_min != self.next_step or result.epoch_min != vote.epoch:
            raise BrokenInvariant(
                f"ranks voted on different steps or epochs: {result}, here step {self.next_step} epoch {vote.epoch}"
            )
        self._decide(vote.epoch)
        if vote.plan is not None and result.flips(vote.plan.plan_id, len(vote.plan.leavers)) and vote.epoch > self.poisoned_epoch:
            self._flip = vote.plan
        if vote.epoch == self._retire_epoch:
            self._retire_epoch = -1
            self._out.append(RetireLinks(vote.epoch))

    def _decide(self, epoch: int) -> None:
        """A yes: the step counts, here and everywhere."""
        self._commits.append(Commit(self.next_step, epoch, self._clock()))
        self.next_step += 1
        if epoch > self.committed_epoch:
            self.committed_epoch = epoch
            self._changed_later()

    # ---------------------------------------------------------------- status

    def _changed_later(self) -> None:
        self._dirty = True

    def _changed(self) -> list[Instruction]:
        self._dirty = True
        return self._take()

    def _take(self) -> list[Instruction]:
        """The instructions gathered by this event, with one status at the end if anything worth telling changed."""
        out, self._out = self._out, []
        if self._dirty:
            self._dirty = False
            self._version += 1
            out.append(SendStatus(self.status()))
        return out

    def status(self) -> RankStatus:
        return RankStatus(
            job_id=self.job_id,
            incarnation=self.incarnation,
            version=self._version,
            rank=self.rank,
            host=self.host,
            port=self.port,
            phase=self.phase,
            run_epoch=self.run_epoch,
            live_epoch=self.live_epoch,
            poisoned_epoch=self.poisoned_epoch,
            next_step=self.next_step,
            applied_step=self.applied_step,
            unknown=self.unknown,
            reported_epoch=self.reported_epoch,
            linked_epoch=self.linked_epoch,
            failed_epoch=self.failed_epoch,
            in_step=not self._at_boundary and self.phase in ("warming", "running", "holding"),
            has_state=self.has_state,
            staged_plan=self._staged_plan,
            dropped_plan=self._dropped_plan,
            flipped_plan=self._flipped_plan,
            committed_epoch=self.committed_epoch,
            record_origin=self.record_origin,
            broken_ranks=tuple(sorted(self.broken_ranks)),
            reason=self.reason,
            error=self.error,
            commits=tuple(self._commits),
            stamps=dict(self.stamps),
            counters=dict(self.counters),
        )
