"""How a joiner gets its role's state: from the frozen leaver, or from a replica and the buddy that keeps the record.

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
    """Asks the replica until it may serve, then the record's keeper."""

    def __init__(self, joiner: SimRank, install: Install, rank: int) -> None:
        super().__init__(joiner, install.membership.epoch)
        self.step = install.target_step
        self.rank = rank
        source = install.joining[rank]
        members = install.membership.members
        processes = self.world.processes
        self.replica = processes[members[source.replica_rank].incarnation] if source.replica_rank is not None else None
        self.keeper = processes[members[source.record_rank].incarnation] if source.record_rank is not None else None
        self.world.checks.record_given_up(joiner, install)
        self.world.after(2 * self.world.link_delay(), joiner, self._ask)

    def _ask(self) -> None:
        if self.over:
            return
        replica = self.replica
        if replica is None or not replica.alive:
            self.fail("the replica does not answer")
            return
        may = None if replica.machine.frozen else replica.core.may_serve(step=self.step)
        if may is False:
            self.fail("the replica is past that step")
        elif may is None:
            self.world.after(self.world.pace("ask_again"), self.joiner, self._ask)
        else:
            assert replica.state is not None
            begin = TrainingState(replica.state.step, replica.state.params, 0)
            self.world.after(self.world.pace("copy"), self.joiner, self._arrived, begin)

    def _arrived(self, begin: TrainingState) -> None:
        if self.over:
            return
        replica = self.replica
        if replica is None or not replica.alive or replica.machine.frozen or replica.state is None:
            self.fail("the replica's connection closed")
            return
        if not replica.core.may_serve(step=self.step):
            self.fail("the replica went on while it was copied")
            return
        if self.keeper is not None and (not self.keeper.alive or self.keeper.machine.frozen):
            self.fail("the keeper of the record does not answer")
            return
        private, origin = self._record(begin.params)
        params = torn(begin, TrainingState(replica.state.step, replica.state.params, 0)).params
        self.succeed(TrainingState(self.step, params, private), origin)

    def _record(self, params: int) -> tuple[int, RecordOrigin]:
        """The small state as its keeper has it; a keeper that is new itself may have none."""
        kept = self.keeper.ward_records.get(self.step) if self.keeper is not None else None
        if kept is not None:
            return kept, "exact"
        return model.approximate_private(params, self.rank), "missing" if self.keeper is not None else "approximate"
