"""What one rank knows, and the few ways to change it. The events that change it are in rank.py, what the daemon wants in
orders.py.

Contract: a change adds what the shell is to do to `out`; `take` hands it over at the end of an event.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from tmd.protocol.handoff import HandoffReport
from tmd.protocol.membership import Membership, Plan
from tmd.protocol.rank import Commit, Directive, Phase, RankStatus, RecordOrigin
from tmd_worker.core.instructions import CloseLinks, DropStaged, Instruction, SendStatus, TakeRole, Wake

#: How many commits a status carries.
COMMITS_KEPT = 64


@dataclasses.dataclass(slots=True)
class Vote:
    """A vote in progress or undecided."""

    epoch: int
    plan: Plan | None
    #: The plan was called off while this vote was under way.
    drop_after: bool = False


class RankState:
    """See the module's contract. Attributes are read everywhere and written in this package only."""

    def __init__(self, *, job_id: str, incarnation: str, rank: int | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.order: Directive | None = None
        self.out: list[Instruction] = []
        self._dirty = False
        self._version = 0
        #: Who has a role from the start builds with live links; a standby builds in sandbox.
        self.builds_live = rank is not None
        self.members: Membership | None = None
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
        self.unreached_epoch = -1
        self.unreached = -1
        self.committed_epoch = -1
        self.has_state = False
        self.record_origin: RecordOrigin = ""
        self.handoff: HandoffReport | None = None
        self.broken_ranks: set[int] = set()
        self.reason = ""
        self.error = ""
        self.stamps: dict[str, float] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self._commits: collections.deque[Commit] = collections.deque(maxlen=COMMITS_KEPT)
        self.install_epoch = -1
        self.links_done = False
        self.state_done = False
        self.plan: Plan | None = None
        self.armed = False
        self.staged_plan = 0
        self.dropped_plan = 0
        self.flipped_plan = 0
        self.flip: Plan | None = None
        self.retire_epoch = -1
        #: The ranks that the last flip replaced: links of epochs before it to them are not watched.
        self.left: frozenset[int] = frozenset()
        self.frozen = False
        self.vote: Vote | None = None
        self.voting = False
        self.yes = False
        self.gave_up = False
        self.at_boundary = False
        self.is_finished = False

    # ---------------------------------------------------------------- role and state

    def take_role(self, rank: int | None) -> None:
        if rank == self.rank:
            return
        self.rank = rank
        if rank is not None:
            self.out.append(TakeRole(rank))

    def holds_state(self) -> bool:
        """That of its role; also from the end of a live build on, though only the end of the warm-up says so to others."""
        return self.has_state or (self.builds_live and self.live_epoch >= 0)

    # ---------------------------------------------------------------- the attempt

    def dead(self) -> bool:
        """The attempt that the main thread is in will not count."""
        return self.run_epoch <= self.poisoned_epoch

    def poison(self, epoch: int, reason: str) -> None:
        if epoch <= self.poisoned_epoch or self.is_finished:
            return
        self.poisoned_epoch = epoch
        self.reason = reason
        self.stamps["poisoned"] = self.clock()
        if self.flip is not None and self.flip.base_epoch <= epoch:
            self.flip = None
        if self.plan is not None and self.plan.base_epoch <= epoch:
            self.drop_plan(at_once=True)
        self.out += [CloseLinks(epoch, reason), Wake()]
        if self.phase == "running" and self.dead():
            self.phase = "holding"
        if not self.voting:
            self.reported_epoch = epoch

    def decide(self, epoch: int) -> None:
        """A yes: the step counts, here and everywhere."""
        self._commits.append(Commit(self.next_step, epoch, self.clock()))
        self.next_step += 1
        if epoch > self.committed_epoch:
            self.committed_epoch = epoch
            self.changed_later()

    # ---------------------------------------------------------------- the plan

    def leaves(self, plan: Plan) -> bool:
        return self.rank is not None and plan.leavers.get(self.rank) == self.incarnation

    def drop_plan(self, *, at_once: bool = False) -> None:
        """The plan is off, unless the vote that is under way carries it (its end decides) or has decided the flip."""
        plan = self.plan
        if plan is None or self.flip is plan:
            return
        if self.voting and not at_once and self.vote is not None and self.vote.plan is plan:
            self.vote.drop_after = True
            return
        self.dropped_plan = max(self.dropped_plan, plan.plan_id)
        self.out.append(DropStaged(plan.plan_id))
        self.forget_plan()

    def forget_plan(self) -> None:
        self.plan = None
        self.armed = False
        self.staged_plan = 0

    # ---------------------------------------------------------------- what the shell is to do

    def changed_later(self) -> None:
        self._dirty = True

    def changed(self) -> list[Instruction]:
        self._dirty = True
        return self.take()

    def take(self) -> list[Instruction]:
        """The instructions gathered by this event, with one status at the end if anything worth telling changed."""
        out, self.out = self.out, []
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
            unreached_epoch=self.unreached_epoch,
            unreached=self.unreached,
            in_step=not self.at_boundary and self.phase in ("warming", "running", "holding"),
            has_state=self.has_state,
            staged_plan=self.staged_plan,
            dropped_plan=self.dropped_plan,
            flipped_plan=self.flipped_plan,
            committed_epoch=self.committed_epoch,
            record_origin=self.record_origin,
            handoff=self.handoff,
            broken_ranks=tuple(sorted(self.broken_ranks)),
            reason=self.reason,
            error=self.error,
            commits=tuple(self._commits),
            stamps=dict(self.stamps),
            counters=dict(self.counters),
        )
