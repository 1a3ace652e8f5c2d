"""The commit vote of one step: record to the buddy, ward's record here, ballots, verdict.

Contract: a yes proves that every rank holds its complete gradients and that every buddy holds its ward's record of this step.
"""

from __future__ import annotations

from tmd_worker import faults
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import Verdict
from tmd_worker.records import RecordShelf
from tmd_worker.runtime import Runtime
from tmd_worker.state.tracked import Tracked
from tmd_worker.transport.fabric import Fabric
from tmd_worker.transport.wire import Kind


class CommitVote:
    """The main thread's part in the votes, and in the records that go with them."""

    def __init__(self, runtime: Runtime, fabric: Fabric, tracked: Tracked, own: RecordShelf) -> None:
        self._runtime = runtime
        self._fabric = fabric
        self._tracked = tracked
        self._own = own

    def cast(self, *, last: bool = False) -> bool:
        """True: the step is to be applied. False: it is discarded. Waits for the resolution if the outcome is unknown.

        `last`: the vote after the last step, which only makes sure that every rank has applied everything.
        """
        ballot = self._runtime.begin_vote(last=last)
        if ballot is None:
            return False
        result: Ballot | None = None
        sent = False
        if last or self._exchange_records(ballot):
            result, sent = self._fabric.vote(ballot, self._runtime.welcome.hold_limit_s)
        return self._runtime.end_vote(result, sent=sent) is Verdict.APPLY

    def note_boundary(self) -> None:
        """The main thread stands at a boundary: what code after the vote has changed is final now."""
        core = self._runtime.core
        step = core.next_step - 1
        if not core.has_state or self._own.tail(step) is not None:
            return
        record = None if self._own.has(step) else self._tracked.record(step)
        tail = b"" if record is not None else self._tracked.tail(step) or b""
        with self._runtime.changed:
            if record is not None:
                self._own.put(step, record)
            self._own.put_tail(step, tail)
            self._runtime.changed.notify_all()

    def send_tail(self, step: int, *, with_record: bool) -> None:
        """Tells the buddy what has changed since the record of `step`; at a new epoch's first step the record goes along."""
        reply = self._own.reply(step)
        if reply is None:
            return
        if with_record:
            self._fabric.buddy.send(Kind.RECORD, step, reply.record)
        self._fabric.buddy.send(Kind.TAIL, step, reply.tail or b"")

    def _exchange_records(self, ballot: Ballot) -> bool:
        """False: a link broke before any ballot was sent."""
        step = ballot.step_min
        record = self._tracked.record(step)
        with self._runtime.changed:
            self._own.put(step, record)
        self._fabric.buddy.send(Kind.RECORD, step, record)
        complete = self._fabric.buddy.wait_for(step, self._runtime.welcome.hold_limit_s)
        faults.point("vote.recorded")
        return complete
