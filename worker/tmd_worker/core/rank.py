"""The rank's state machine: step, vote, poison, flip, fence, relink, recovery (docs/protocol.md draws it).

Contract: every public method is one event; it changes the state and returns instructions for the shell, in order. The
caller serialises the calls (one lock) and injects the clock. Nothing here blocks, and nothing here does I/O.
"""

from __future__ import annotations

from tmd.protocol.membership import Plan
from tmd.protocol.rank import Directive, RecordOrigin
from tmd_worker.core.answers import Admission, Boundary, BrokenInvariant, Turn, Verdict
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.instructions import ActivateLinks, Exit, Instruction, RetireLinks, SwitchLinks, Wake
from tmd_worker.core.orders import reconsider
from tmd_worker.core.state import RankState, Vote

__all__ = ["Admission", "Boundary", "BrokenInvariant", "RankCore", "Turn", "Verdict"]


class RankCore(RankState):
    """One incarnation of a rank. See the module's contract."""

    # ---------------------------------------------------------------- life of the process

    def started(self, host: str, port: int) -> list[Instruction]:
        """The listener is up."""
        self.host, self.port = host, port
        return self.changed()

    def build_begins(self) -> list[Instruction]:
        """The script's main is entered."""
        self.phase = "building"
        return self.changed()

    def warm_up_begins(self) -> list[Instruction]:
        """Main has reached its first step; shadow steps follow."""
        self.phase = "warming"
        return self.changed()

    def warm_up_ended(self) -> list[Instruction]:
        """State is as it was after the build. Who built live holds the state of its role: it has just made it."""
        if self.builds_live and self.live_epoch >= 0:
            self.has_state = True
            self.phase = "holding" if self.live_epoch <= self.poisoned_epoch else "running"
        else:
            self.phase = "ready"
        return self.changed()

    def finished(self) -> list[Instruction]:
        """The last vote (after the last step) said yes: every rank has applied everything."""
        self.is_finished = True
        self.phase = "finished"
        return self.changed()

    def failed(self, error: str) -> list[Instruction]:
        """The user's code raised while nothing was poisoned."""
        self.phase = "failed"
        self.error = error[-16_384:]
        return self.changed()

    def last_words(self, error: str) -> list[Instruction]:
        """This process is about to end by itself, and says why: not by the script's fault."""
        self.error = error[-16_384:]
        return self.changed()

    def count(self, name: str, number: int) -> None:
        """The shell has counted something that is worth showing; the next status tells it."""
        self.counters[name] += number

    def heartbeat(self, unreached: int = -1) -> list[Instruction]:
        """Time to tell the daemon that all is well, and to look again at what it wants. `unreached`: the rank that is being
        dialed for the installation and does not answer."""
        if self.failed_epoch < self.install_epoch:
            self._note_unreached(unreached)
        if self.order is not None and not self.is_finished:
            reconsider(self, self.order)
        return self.changed()

    # ---------------------------------------------------------------- what the daemon wants

    def on_directive(self, order: Directive) -> list[Instruction]:
        """Compare what the daemon wants with what is, and do the difference. Old, repeated and foreign ones do nothing."""
        newest = self.order
        if order.incarnation != self.incarnation:
            return []
        if newest is not None and (order.generation, order.sequence) <= (newest.generation, newest.sequence):
            return []
        self.order = order
        if order.retired:
            return [*self.changed(), Exit(0, "replaced: another incarnation has this role now")]
        if self.is_finished:
            return []
        reconsider(self, order)
        return self.changed()

    # ---------------------------------------------------------------- links and state, as the shell reports them

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> list[Instruction]:
        """A link of a group closed. `orderly`: the peer sent STOP first, so it lives and is poisoned itself.

        A link kept over a flip may still be reported under the epoch before: that breaks the live one. Only links to
        the leavers may close then. A frozen leaver takes part in nothing: the others close their links to it when they
        are done with it.
        """
        if self.is_finished or epoch <= self.poisoned_epoch:
            return []
        if epoch < self.live_epoch and peer in self.left:
            return []
        if self.frozen and epoch <= self.live_epoch:
            return []
        if not orderly:
            self.broken_ranks.add(peer)
        if epoch <= self.live_epoch:
            self.poison(self.live_epoch, reason)
        elif epoch == self.install_epoch:
            self.failed_epoch = epoch
            self.reason = reason
        elif self.plan is not None and epoch == self.plan.successor.epoch:
            self.reason = reason
            self.drop_plan()
        return self.changed()

    def peer_exiting(self, incarnation: str) -> list[Instruction]:
        """The agent sees that a process of this node is dying."""
        members = self.members
        rank = members.rank_of(incarnation) if members is not None else None
        if members is None or rank is None or rank == self.rank:
            return []
        return self.link_broken(members.epoch, rank, orderly=False, reason=f"rank {rank} is exiting")

    def links_ready(self, epoch: int, opened: int) -> list[Instruction]:
        self.counters["links_opened"] += opened
        self._note_unreached(-1)
        return self._part_installed(epoch, links=True)

    def links_failed(self, epoch: int, reason: str, unreached: int = -1) -> list[Instruction]:
        """`unreached`: the rank that could not be reached or does not answer, if that is why."""
        if epoch == self.install_epoch:
            self._note_unreached(unreached)
        return self._install_failed(epoch, reason)

    def state_loaded(self, epoch: int, step: int, origin: RecordOrigin) -> list[Instruction]:
        """The joiner holds the state of its role as it is before `step`, for the installation of `epoch`."""
        plan = self.plan
        planned = plan is not None and epoch == plan.successor.epoch
        if epoch <= self.poisoned_epoch or not (planned or epoch == self.install_epoch):
            return []
        self.record_origin = origin
        self.has_state = True
        self.next_step = self.applied_step = step
        self.stamps["state"] = self.clock()
        if plan is not None and planned:
            self.flipped_plan = plan.plan_id
            self.linked_epoch = self.live_epoch = epoch
            self.install_epoch = max(self.install_epoch, epoch)
            self.members = plan.successor
            self.forget_plan()
            self.out += [ActivateLinks(epoch), Wake()]
            return self.changed()
        return self._part_installed(epoch, links=False)

    def state_failed(self, epoch: int, reason: str) -> list[Instruction]:
        """The state could not be had. In a plan the joiner steps back; if the flip has happened the daemon recovers."""
        plan = self.plan
        if plan is not None and epoch == plan.successor.epoch and epoch > self.poisoned_epoch:
            self.failed_epoch = epoch
            self.reason = reason
            self.drop_plan()
            return self.changed()
        return self._install_failed(epoch, reason)

    def staged(self, plan_id: int, opened: int) -> list[Instruction]:
        self.counters["links_opened"] += opened
        if self.plan is not None and self.plan.plan_id == plan_id:
            self.staged_plan = plan_id
            self.stamps["staged"] = self.clock()
        return self.changed()

    def stage_failed(self, plan_id: int, reason: str) -> list[Instruction]:
        if self.plan is not None and self.plan.plan_id == plan_id:
            self.reason = reason
            self.drop_plan()
        return self.changed()

    def _part_installed(self, epoch: int, *, links: bool) -> list[Instruction]:
        if epoch != self.install_epoch or epoch <= self.poisoned_epoch:
            return []
        if links:
            self.links_done = True
        else:
            self.state_done = True
        if self.links_done and self.state_done and self.failed_epoch < epoch:
            self.linked_epoch = epoch
            self.stamps["linked"] = self.clock()
        return self.changed()

    def _note_unreached(self, rank: int) -> None:
        self.unreached_epoch, self.unreached = self.install_epoch, rank

    def _install_failed(self, epoch: int, reason: str) -> list[Instruction]:
        if epoch != self.install_epoch or epoch <= self.poisoned_epoch:
            return []
        self.failed_epoch = epoch
        self.reason = reason
        return self.changed()

    # ---------------------------------------------------------------- the step

    def boundary(self) -> tuple[Boundary, list[Instruction]]:
        """The main thread stands between two steps, with everything before `next_step` applied and its tail done."""
        if self.has_state and self.applied_step != self.next_step:
            raise BrokenInvariant(f"at a boundary with step {self.next_step} decided and {self.applied_step} applied")
        self.yes = False
        if self.dead() and not self.at_boundary:
            self.changed_later()  # whoever waits for this rank's state need wait no longer
        self.at_boundary = True
        if self.flip is not None and not self.dead():
            self._perform_flip(self.flip)
        if not self.has_state or self.frozen:
            return Boundary(Turn.WAIT), self.take()
        if self.run_epoch < 0 or self.dead():
            if self.live_epoch <= max(self.poisoned_epoch, self.run_epoch):
                return Boundary(Turn.WAIT), self.take()
            self.run_epoch = self.live_epoch
        if self.phase != "running":
            self.phase = "running"
            self.changed_later()
        self.at_boundary = False
        rollback, self.gave_up = self.gave_up, False
        return Boundary(Turn.RUN, self.next_step, self.run_epoch, rollback), self.take()

    def _perform_flip(self, plan: Plan) -> None:
        self.flip = None
        self.stamps["flip"] = self.clock()
        self.flipped_plan = plan.plan_id
        if self.leaves(plan):
            self.frozen = True
            self.phase = "frozen"
        else:
            epoch = plan.successor.epoch
            self.live_epoch = self.run_epoch = self.linked_epoch = epoch
            self.install_epoch = max(self.install_epoch, epoch)
            self.retire_epoch = epoch
            self.left = frozenset(plan.leavers)
            self.members = plan.successor
            self.out.append(SwitchLinks(plan, epoch))
        self.forget_plan()
        self.changed_later()

    def discarded(self) -> None:
        """The attempt was given up; the next boundary rolls back."""
        self.gave_up = True
        self.counters["steps_redone"] += 1

    def admit(self, *, in_autograd: bool, log_only: bool = False) -> Admission:
        """What becomes of a collective called now (the shell answers SANDBOX itself during shadow steps)."""
        if self.is_finished:
            return Admission.PROCEED
        if self.run_epoch < 0 and self.live_epoch < 0:
            return Admission.SANDBOX
        epoch = self.run_epoch if self.run_epoch >= 0 else self.live_epoch
        poisoned = epoch <= self.poisoned_epoch
        if self.yes and not log_only:
            return Admission.LOCAL if in_autograd else Admission.AFTER_VOTE
        if poisoned:
            return Admission.LOCAL if in_autograd or log_only else Admission.DISCARD
        return Admission.PROCEED

    def vote_begins(self, *, last: bool = False) -> Ballot | None:
        """The ballot to send, or None: poisoned, the attempt is over. `last`: the vote after the last step."""
        if self.dead():
            return None
        plan = self.plan if self.plan is not None and self.plan.base_epoch == self.run_epoch and not last else None
        self.voting = True
        self.vote = Vote(self.run_epoch, plan)
        return Ballot.single(
            epoch=self.run_epoch,
            step=self.next_step,
            plan=plan.plan_id if plan else 0,
            staged=bool(plan and self.staged_plan == plan.plan_id),
            ready=bool(plan and self.armed),
        )

    def vote_ended(self, result: Ballot | None, *, sent: bool) -> tuple[Verdict, list[Instruction]]:
        """`result` None: the vote broke; `sent`: a frame of this rank's ballot may have left."""
        vote = self.vote
        if not self.voting or vote is None:
            raise BrokenInvariant("a vote ended that had not begun")
        self.voting = False
        if result is not None:
            self._accept(result, vote)
        elif sent:
            self.unknown = True
        if vote.drop_after and self.flip is None and self.plan is vote.plan:
            self.drop_plan(at_once=True)
        if self.dead():
            self.reported_epoch = max(self.reported_epoch, self.poisoned_epoch)
        elif result is None:
            raise BrokenInvariant("a vote broke and nothing is poisoned")
        if result is not None:
            self.yes = True
            return Verdict.APPLY, self.changed() if self.dead() else self.take()
        return (Verdict.BLOCK if sent else Verdict.DISCARD), self.changed()

    def verdict(self) -> Verdict:
        """Asked again after BLOCK: the resolution has decided, or not yet."""
        if self.unknown:
            return Verdict.BLOCK
        return Verdict.APPLY if self.yes else Verdict.DISCARD

    def applied(self) -> None:
        """The optimizer has stepped (or the step ended without one): the decided step is in the state."""
        self.applied_step = self.next_step

    def may_serve(self, *, step: int) -> bool | None:
        """May this rank's state be given to a joiner of `step`? None: not yet, False: never.

        Ask again after copying: True then says that nothing changed meanwhile.
        """
        if self.next_step > step or self.live_epoch > self.poisoned_epoch:
            return False
        if not self.has_state or not self.at_boundary or self.next_step < step:
            return None
        return self.applied_step == step

    def may_hand_record(self) -> bool:
        """May the buddy be given this rank's record? An approximate one only once the job has gone on with it: should this rank
        be lost before, whoever gets that record next would take it for exact, and nobody would say that it is not."""
        return self.run_epoch >= 0 or self.record_origin not in ("approximate", "missing")

    def leaver_step(self, plan_id: int) -> int | None:
        """On the leaver: the step that the joiner runs first, once frozen by this plan. None: not yet.

        Raises LookupError when this plan will never flip here.
        """
        if self.flipped_plan == plan_id and self.frozen:
            return self.next_step
        if self.dropped_plan >= plan_id or self.flipped_plan >= plan_id:
            raise LookupError(f"plan {plan_id} is off")
        return None

    def _accept(self, result: Ballot, vote: Vote) -> None:
        if not result.agrees() or result.step_min != self.next_step or result.epoch_min != vote.epoch:
            raise BrokenInvariant(
                f"ranks voted on different steps or epochs: {result}, here step {self.next_step} epoch {vote.epoch}"
            )
        self.decide(vote.epoch)
        if vote.plan is not None and result.flips(vote.plan.plan_id, len(vote.plan.leavers)) and vote.epoch > self.poisoned_epoch:
            self.flip = vote.plan
        if vote.epoch == self.retire_epoch:
            self.retire_epoch = -1
            self.out.append(RetireLinks(vote.epoch))
