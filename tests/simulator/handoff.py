"""How a joiner gets its role's state: from the frozen leaver, or from replicas and the buddy that keeps the record.

A transfer takes time, breaks when an end dies, and copies piece by piece: what its source changes meanwhile shows in the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulator import model
from tests.simulator.model import TrainingState
from tmd.protocol.membership import Install, Plan
from tmd.protocol.rank import RecordOrigin

if TYPE_CHECKING:
    from tests.simulator.rank import SimRank


def torn(begin: TrainingState, end: TrainingState) -> TrainingState:
    """What arrives if the source was `begin` at first and `end` at last."""
    if begin == end:
        return TrainingState(end.step, end.params, end.private)
    return TrainingState(begin.step, hash((begin.params, end.params, "torn")), end.private)


class Fetch:
    """One try to get a state for `epoch`."""

    def __init__(self, joiner: SimRank, epoch: int) -> None:
        self.joiner = joiner
        self.world = joiner.world
        self.epoch = epoch
        self.over = False

    def cancel(self) -> None:
        self.over = True

    def succeed(self, state: TrainingState, origin: RecordOrigin) -> None:
        """The thread that copied tells the core a little later: by then the epoch may be over."""
        self.over = True
        self.world.after(self.world.hop(), self.joiner, self._report, state, origin)

    def _report(self, state: TrainingState, origin: RecordOrigin) -> None:
        if self.joiner.fetch is self:
            self.joiner.state_arrived(self.epoch, state, origin)

    def fail(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self.joiner.perform(self.joiner.core.state_failed(self.epoch, reason))


class FromLeaver(Fetch):
    """Subscribes at the leaver; the copy begins when it has frozen."""

    def __init__(self, joiner: SimRank, plan: Plan, rank: int) -> None:
        super().__init__(joiner, plan.successor.epoch)
        self.plan = plan
        self.source = self.world.processes[plan.leavers[rank]]
        self._copying = False
        self.world.after(2 * self.world.link_delay(), joiner, self._subscribe)

    def _subscribe(self) -> None:
        if self.over:
            return
        if not self.source.alive:
            self.fail("the leaver does not answer")
            return
        self.source.subscribers.append(self)
        self.look()

    def cancel(self) -> None:
        super().cancel()
        if self in self.source.subscribers:
            self.source.subscribers.remove(self)

    def look(self) -> None:
        """On the leaver: has it frozen, or will it never?"""
        if self._copying or self.over or self.source.machine.frozen:
            return
        try:
            step = self.source.core.leaver_step(self.plan.plan_id)
        except LookupError as error:
            self._copying = True
            self.world.after(self.world.link_delay(), self.joiner, self.fail, str(error))
            return
        if step is None:
            return
        self._copying = True
        state = self.source.state
        assert state is not None
        begin = TrainingState(step, state.params, state.private)
        self.world.faults.point("handoff", self.joiner)
        self.world.faults.point("handoff_source", self.source)
        self.world.after(self.world.pace("copy"), self.joiner, self._arrived, begin)

    def source_lost(self) -> None:
        self.fail("the leaver's connection closed")

    def _arrived(self, begin: TrainingState) -> None:
        if self.over:
            return
        source = self.source
        if not source.alive:
            self.fail("the leaver's connection closed")
            return
        if source.machine.frozen:
            self.world.after(self.world.pace("copy"), self.joiner, self._arrived, begin)
            return
        assert source.state is not None
        self.joiner.ward_records = dict(source.ward_records)
        self.succeed(torn(begin, source.state), "exact")


class FromSurvivors(Fetch):
    """Asks every replica until it may serve; each that may brings a share, and leaves it to the others if it fails. The first
    that is left leads: what the others brought counts if it is what the leader holds. Then the record's keeper is asked."""

    def __init__(self, joiner: SimRank, install: Install, rank: int) -> None:
        super().__init__(joiner, install.membership.epoch)
        self.step = install.target_step
        self.rank = rank
        source = install.joining[rank]
        members = install.membership.members
        processes = self.world.processes
        assert source.replica_rank is not None
        self._asked = [processes[members[rank].incarnation] for rank in (source.replica_rank, *source.other_replicas)]
        #: What those that may serve held when they began.
        self._begun: dict[SimRank, TrainingState] = {}
        self.keeper = processes[members[source.record_rank].incarnation] if source.record_rank is not None else None
        self.world.checks.record_given_up(joiner, install)
        for replica in self._asked:
            self.world.after(2 * self.world.link_delay(), joiner, self._ask, replica)

    def _ask(self, replica: SimRank) -> None:
        if self.over:
            return
        if not replica.alive:
            self._leave(replica, "the replica does not answer")
            return
        may = None if replica.machine.frozen else replica.core.may_serve(step=self.step)
        if may is False:
            self._leave(replica, "the replica is past that step")
        elif may is None:
            self.world.after(self.world.pace("ask_again"), self.joiner, self._ask, replica)
        else:
            assert replica.state is not None
            self._begun[replica] = TrainingState(replica.state.step, replica.state.params, 0)
            if len(self._begun) == 1:
                self.world.faults.point("fetch_source", replica)
                self._copy()

    def _copy(self) -> None:
        self.world.after(self.world.pace("copy"), self.joiner, self._arrived)

    def _leave(self, replica: SimRank, why: str) -> None:
        self._asked.remove(replica)
        self._begun.pop(replica, None)
        if not self._asked:
            self.fail(why)

    def _arrived(self) -> None:
        if self.over:
            return
        broken = {replica: why for replica in self._begun if (why := self._trouble(replica))}
        for replica, why in broken.items():
            self._leave(replica, why)
        if self.over or not self._begun:
            return  # whoever is still asked begins again
        if broken:
            self._copy()  # their shares
            return
        if self.keeper is not None and (not self.keeper.alive or self.keeper.machine.frozen):
            self.fail("the keeper of the record does not answer")
            return
        lead, begin = next(iter(self._begun.items()))
        assert lead.state is not None
        private, origin = self._record(begin.params)
        params = torn(begin, TrainingState(lead.state.step, lead.state.params, 0)).params
        self.succeed(TrainingState(self.step, params, private), origin)

    def _trouble(self, replica: SimRank) -> str:
        """Why it brings nothing more; empty: it does."""
        if not replica.alive or replica.machine.frozen or replica.state is None:
            return "the replica's connection closed"
        return "" if replica.core.may_serve(step=self.step) else "the replica went on while it was copied"

    def _record(self, params: int) -> tuple[int, RecordOrigin]:
        """The small state as its keeper has it; a keeper that is new itself may have none."""
        kept = self.keeper.ward_records.get(self.step) if self.keeper is not None else None
        if kept is not None:
            return kept, "exact"
        return model.approximate_private(params, self.rank), "missing" if self.keeper is not None else "approximate"
