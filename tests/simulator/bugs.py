"""Planted bugs: patches to the cores by name, each a mistake that somebody could make. The simulator must find every one."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tmd.core import launching, recovery, releasing
from tmd.core.daemon import DaemonCore
from tmd.core.instructions import DirectAgent, Instruction, Persist
from tmd.core.records import LedgerSnapshot
from tmd.core.settings import CoreSettings
from tmd.protocol.agent import ProcessSpec
from tmd.protocol.membership import Plan
from tmd.protocol.rank import Directive
from tmd_worker.core import instructions as do
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import Boundary, RankCore, Turn, Verdict

# -------------------------------------------------------------------- bugs of the rank's core


class ApplyOnUnknown(RankCore):
    """An unknown vote is taken for a yes."""

    def vote_ended(self, result: Ballot | None, *, sent: bool) -> tuple[Verdict, list[do.Instruction]]:
        verdict, out = super().vote_ended(result, sent=sent)
        if verdict is not Verdict.BLOCK or self.vote is None:
            return verdict, out
        self.unknown = False
        self.yes = True
        self.decide(self.vote.epoch)
        return Verdict.APPLY, [*out, *self.changed()]


class DiscardOnUnknown(RankCore):
    """An unknown vote is taken for a no."""

    def vote_ended(self, result: Ballot | None, *, sent: bool) -> tuple[Verdict, list[do.Instruction]]:
        verdict, out = super().vote_ended(result, sent=sent)
        if verdict is not Verdict.BLOCK:
            return verdict, out
        self.unknown = False
        return Verdict.DISCARD, [*out, *self.changed()]


class FlipWithoutFlag(RankCore):
    """Everything staged is enough, whether the leavers raised their flags or not."""

    def _accept(self, result: Ballot, vote: Any) -> None:
        plan = vote.plan
        super()._accept(result, vote)
        if plan is not None and result.staged and result.plan_min == plan.plan_id and vote.epoch > self.poisoned_epoch:
            self.flip = plan


class FlipWithoutStaged(RankCore):
    """The leavers' flags are enough, and they raise them without being armed."""

    def vote_begins(self, *, last: bool = False) -> Ballot | None:
        self.armed = self.plan is not None and self.leaves(self.plan)
        return super().vote_begins(last=last)

    def _accept(self, result: Ballot, vote: Any) -> None:
        plan = vote.plan
        super()._accept(result, vote)
        if plan is not None and result.ready_leavers == len(plan.leavers) and vote.epoch > self.poisoned_epoch:
            self.flip = plan


class PoisonDoesNotSpread(RankCore):
    """Who gives up does not close its links."""

    def take(self) -> list[do.Instruction]:
        return [instruction for instruction in super().take() if not isinstance(instruction, do.CloseLinks)]


class PoisonedRankVotes(RankCore):
    """A rank that has given up takes part in the vote: its report was not final."""

    def dead(self) -> bool:
        return self.at_boundary and super().dead()


class ReportsInsideTheVote(RankCore):
    """A rank reports at the moment of poison though its vote may still say yes."""

    def poison(self, epoch: int, reason: str) -> None:
        before = self.poisoned_epoch
        super().poison(epoch, reason)
        if self.poisoned_epoch > before:
            self.reported_epoch = epoch


class StaleEpochAccepted(RankCore):
    """The end of a link of an epoch that is over counts for the epoch that runs."""

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> list[do.Instruction]:
        return super().link_broken(max(epoch, self.live_epoch), peer, orderly=orderly, reason=reason)


class WaitsForTheDaemon(RankCore):
    """A rank begins a step only if it has heard from the daemon lately."""

    _heard_s = -1.0

    def on_directive(self, order: Directive) -> list[do.Instruction]:
        self._heard_s = self.clock()
        return super().on_directive(order)

    def boundary(self) -> tuple[Boundary, list[do.Instruction]]:
        turn, out = super().boundary()
        if turn.turn is Turn.RUN and self.clock() - self._heard_s > 0.5:
            self.at_boundary = True
            return Boundary(Turn.WAIT), out
        return turn, out


class GoBeforeLinked(RankCore):
    """A rank says that it is linked when it has only begun to link, and believes the word to go on."""

    def on_directive(self, order: Directive) -> list[do.Instruction]:
        before = self.install_epoch
        out = super().on_directive(order)
        if self.install_epoch == before:
            return out
        self.linked_epoch = self.install_epoch
        return [*out, *self.changed()]


class LeaverRunsOn(RankCore):
    """The leaver does not freeze at the flip: it and the joiner are both in the next step."""

    def _perform_flip(self, plan: Plan) -> None:
        super()._perform_flip(plan)
        if self.leaves(plan):
            self.frozen = False


class JoinerGetsWrongStep(RankCore):
    """The leaver hands its state over as soon as the vote has flipped, before the step is applied."""

    def leaver_step(self, plan_id: int) -> int | None:
        if self.flip is not None and self.flip.plan_id == plan_id:
            return self.next_step
        return super().leaver_step(plan_id)


class ReplicaServesTooEarly(RankCore):
    """A replica hands its state over while it may still apply the undecided step."""

    def may_serve(self, *, step: int) -> bool | None:
        return super().may_serve(step=step) is not False


class AbortIgnored(RankCore):
    """A leaver says that it has dropped the plan and votes for it all the same."""

    def drop_plan(self, *, at_once: bool = False) -> None:
        plan = self.plan
        if plan is None or not self.leaves(plan) or at_once:
            super().drop_plan(at_once=at_once)
            return
        self.dropped_plan = max(self.dropped_plan, plan.plan_id)


class FlipThoughPoisoned(RankCore):
    """A flip that was decided is carried out although the epoch was called off meanwhile."""

    _wanted: Plan | None = None

    def _accept(self, result: Ballot, vote: Any) -> None:
        super()._accept(result, vote)
        self._wanted = self.flip

    def boundary(self) -> tuple[Boundary, list[do.Instruction]]:
        if self._wanted is not None and self.flip is None and self._wanted.plan_id > self.flipped_plan:
            self._perform_flip(self._wanted)
        self._wanted = None
        return super().boundary()


class RetiresBeforeFirstYes(RankCore):
    """A stayer that has switched says that the new epoch has committed."""

    def _perform_flip(self, plan: Plan) -> None:
        super()._perform_flip(plan)
        self.committed_epoch = plan.successor.epoch


# -------------------------------------------------------------------- bugs of the daemon's core


class ForgetsThePlan(DaemonCore):
    """A restarted daemon does not know that a flip is on its way."""

    def __init__(self, settings: CoreSettings, *, snapshot: LedgerSnapshot | None = None, **arguments: Any) -> None:
        if snapshot is not None:
            jobs = tuple(msgspec.structs.replace(job, plan=None, armed=False) for job in snapshot.jobs)
            snapshot = msgspec.structs.replace(snapshot, jobs=jobs)
        super().__init__(settings, snapshot=snapshot, **arguments)


RANK_BUGS: dict[str, type[RankCore]] = {
    "apply_on_unknown": ApplyOnUnknown,
    "discard_on_unknown": DiscardOnUnknown,
    "flip_without_flag": FlipWithoutFlag,
    "flip_without_staged": FlipWithoutStaged,
    "poison_does_not_spread": PoisonDoesNotSpread,
    "poisoned_rank_votes": PoisonedRankVotes,
    "reports_inside_the_vote": ReportsInsideTheVote,
    "stale_epoch_accepted": StaleEpochAccepted,
    "waits_for_the_daemon": WaitsForTheDaemon,
    "go_before_linked": GoBeforeLinked,
    "leaver_runs_on": LeaverRunsOn,
    "joiner_gets_wrong_step": JoinerGetsWrongStep,
    "replica_serves_too_early": ReplicaServesTooEarly,
    "abort_ignored": AbortIgnored,
    "flip_though_poisoned": FlipThoughPoisoned,
    "retires_before_first_yes": RetiresBeforeFirstYes,
}
DAEMON_BUGS: dict[str, type[DaemonCore]] = {
    "forgets_the_plan": ForgetsThePlan,
}

# -------------------------------------------------------------------- bugs in what the daemon sends


def acts_before_it_persists(_: Cores, out: list[Instruction]) -> list[Instruction]:
    """What is to be durable first is written last."""
    return sorted(out, key=lambda instruction: isinstance(instruction, Persist))


def zombie_not_fenced(cores: Cores, out: list[Instruction]) -> list[Instruction]:
    """An incarnation once named is named for ever, so its agent never kills it."""
    fixed: list[Instruction] = []
    for instruction in out:
        if isinstance(instruction, DirectAgent) and instruction.directive.job_over is None:
            named = cores.named.setdefault(instruction.agent_id, {})
            named.update({spec.incarnation: spec for spec in instruction.directive.processes})
            directive = msgspec.structs.replace(instruction.directive, processes=tuple(named.values()))
            fixed.append(DirectAgent(instruction.agent_id, directive))
        else:
            fixed.append(instruction)
    return fixed


ORDER_BUGS: dict[str, Callable[[Cores, list[Instruction]], list[Instruction]]] = {
    "acts_before_it_persists": acts_before_it_persists,
    "zombie_not_fenced": zombie_not_fenced,
}
#: A name in a module of the daemon's core -> what it is replaced by.
MODULE_BUGS: dict[str, tuple[Any, str, Any]] = {
    # The smallest next step instead of the largest: what one rank has applied, others discard.
    "resolves_to_the_least": (recovery, "max", min),
    # A resolution does not wait until everybody has reported.
    "resolves_too_early": (recovery, "_wait_for_reports", lambda job, now: None),
    # Nodes that were given back stay in the job's allocation.
    "gives_nothing_back": (releasing, "_due", lambda job, now: []),
    # Nothing keeps a node in the job: the batch script's own agent is sent away.
    "sends_the_batch_host_away": (releasing, "_obstacle", lambda job, node: ""),
    # Nobody starts an agent where one is missing.
    "launches_nobody": (launching, "_look_after", lambda job, now, node: None),
}
#: A rank votes without waiting for the record of its ward.
SHELL_BUGS = ("votes_without_record",)
NAMES = (*RANK_BUGS, *DAEMON_BUGS, *ORDER_BUGS, *MODULE_BUGS, *SHELL_BUGS)


@contextlib.contextmanager
def planted(bug: str) -> Iterator[None]:
    """While a seed runs: what cannot be planted by another class of core."""
    if bug not in MODULE_BUGS:
        yield
        return
    module, name, value = MODULE_BUGS[bug]
    with unittest.mock.patch.object(module, name, value, create=True):
        yield


class Cores:
    """Makes the cores of one seed, sound ones or with one planted bug."""

    def __init__(self, bug: str = "") -> None:
        if bug and bug not in NAMES:
            raise ValueError(f"no bug is called {bug!r}; there are {', '.join(NAMES)}")
        self._rank = RANK_BUGS.get(bug, RankCore)
        self._daemon = DAEMON_BUGS.get(bug, DaemonCore)
        self._order = ORDER_BUGS.get(bug)
        self.votes_without_record = bug == "votes_without_record"
        #: Agent -> every process that it was ever told to run.
        self.named: dict[str, dict[str, ProcessSpec]] = {}

    def rank(self, **arguments: Any) -> RankCore:
        return self._rank(**arguments)

    def daemon(self, settings: CoreSettings, **arguments: Any) -> DaemonCore:
        return self._daemon(settings, **arguments)

    def order_of(self, out: list[Instruction]) -> list[Instruction]:
        """The instructions of a batch as they are carried out."""
        return self._order(self, out) if self._order is not None else out
