"""One rank process and one agent as the daemon knows them: the record, and the newest word that was heard."""

from __future__ import annotations

import dataclasses

from tmd.core.records import RankRecord
from tmd.protocol.agent import AgentDirective, OrderStatus, ProcessStatus
from tmd.protocol.membership import Member
from tmd.protocol.rank import Directive, RankStatus

#: States of an incarnation that may still speak; all others are fenced for good.
ACTIVE_STATES = frozenset({"starting", "standby", "member", "leaver", "joiner"})
#: What is known of a rank that has not spoken yet.
NOTHING_HEARD = RankStatus(job_id="", incarnation="", version=-1, rank=None)


@dataclasses.dataclass(slots=True)
class Process:
    """One incarnation."""

    record: RankRecord
    #: The role that its process was started with; None: as a standby.
    first_rank: int | None
    status: ProcessStatus | None = None
    report: RankStatus = NOTHING_HEARD
    #: When `report` was renewed last.
    heard_s: float = 0.0
    #: Until when it may leave of its own accord after it was retired; None: it was not, or its time is up.
    leave_until_s: float | None = None
    #: Commits below this step have been taken from its reports.
    commits_taken: int = 0
    #: It was declared lost when its end was seen, before its exit code was known; and that has been looked at since.
    seen_dying: bool = False
    judged: bool = False
    directive: Directive | None = None

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    @property
    def node(self) -> str:
        return self.record.node

    @property
    def active(self) -> bool:
        return self.record.state in ACTIVE_STATES

    @property
    def dying(self) -> bool:
        """Its exit has begun or is over."""
        return self.status is not None and self.status.state in ("exiting", "exited")

    @property
    def exited(self) -> bool:
        return self.status is not None and self.status.state == "exited"

    @property
    def leaving(self) -> bool:
        """Retired, and not gone yet."""
        return self.leave_until_s is not None and not self.exited

    @property
    def exit_code(self) -> int | None:
        return self.status.exit_code if self.status is not None else None

    @property
    def poisoned(self) -> bool:
        """By its own word, the attempt that it is in does not count."""
        return self.report.live_epoch >= 0 and self.report.poisoned_epoch >= self.report.live_epoch

    @property
    def step_shown(self) -> int:
        """The step that it runs next; after the last one: the number of steps, without the vote that ends the job."""
        return self.report.next_step - (self.report.phase == "finished")

    @property
    def joining(self) -> bool:
        """It is to take a role and has never run in it."""
        return self.record.state == "joiner" and self.report.live_epoch < 0

    @property
    def failed_itself(self) -> bool:
        """The user's code raised in a role, while nothing was poisoned."""
        return self.report.phase == "failed" and not self.joining

    @property
    def touched(self) -> bool:
        """It has held the state of a role, so it can never be a standby again."""
        return self.report.has_state or self.report.run_epoch >= 0

    def can_reach(self, target_step: int) -> bool:
        """Its state is that before `target_step`, or becomes it by applying the undecided step."""
        report = self.report
        if not report.has_state and report.phase not in ("warming", "running", "holding"):
            return False
        return report.next_step == target_step or (report.next_step == target_step - 1 and report.unknown)

    def member(self) -> Member:
        """Its entry in a table."""
        return Member(incarnation=self.incarnation, node=self.node, host=self.report.host, port=self.report.port)


@dataclasses.dataclass(slots=True)
class Agent:
    """One life of `tmd-run` on a node."""

    agent_id: str
    node: str
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    connected: bool = False
    #: It has sent its whole status since it connected.
    reported: bool = False
    connected_s: float = 0.0
    heard_s: float = 0.0
    gone_s: float = 0.0
    version: int = -1
    #: Why its word counts no more; empty while it does.
    fenced: str = ""
    #: Its node was given back: it has nothing to do any more.
    released: bool = False
    #: It can carry out orders with the resource manager's commands; and it was started by such an order.
    launches: bool = False
    launched: bool = False
    #: It can take nodes from the pool.
    grows: bool = False
    #: What it has said of its orders.
    orders: dict[str, OrderStatus] = dataclasses.field(default_factory=dict)
    #: Standby processes that died before they were ready, by slot.
    stillborn: dict[int, int] = dataclasses.field(default_factory=dict)
    #: The newest directive, and when it was sent last.
    sent: AgentDirective | None = None
    sent_s: float = 0.0

    @property
    def serves(self) -> bool:
        """Its node is part of the job."""
        return not self.fenced and not self.released
