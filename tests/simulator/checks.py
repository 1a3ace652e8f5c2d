"""The rules of DESIGN.md section 12, looked at whenever something happens that could break one, and once more at the end.

1 bit identity, 2 exactly once, 3 one incarnation per rank and epoch, 4 nothing before the flip harms the job, 5 the daemon away
harms nothing, 6 every migration ends with a reason and every node is accounted for. Also: no decision is acted on before it is
in the ledger, no report changes after it was given, nothing hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.simulator.links import End, Frame, Route
from tests.simulator.model import Chain, TrainingState, approximate_private
from tmd.core.instructions import Persist
from tmd.core.records import JobRecord, RankRecord
from tmd.protocol.agent import AgentDirective, JobOver
from tmd.protocol.membership import Install, Membership, Plan, buddy_of
from tmd.protocol.rank import Directive, RankStatus
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.rank import Boundary

if TYPE_CHECKING:
    from tests.simulator.rank import SimRank
    from tests.simulator.world import World

#: A job in which nothing moves for this long hangs.
STALL_S = 20.0
#: What hit a member this long before an epoch began may be what ends it.
CAUSE_S = 1.5
#: What was hit this long ago is either lost or well again.
CALM_S = 3.0
#: A job that nothing has hit takes its steps while the daemon is away: a step is at most this long.
STEP_S = 0.8
#: A fenced process on a node that can be reached is dead after this long.
FENCE_S = 4.0


class Violation(AssertionError):
    """A rule is broken; the text says which and by whom."""


class Checks:
    """Raises Violation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults = 0
        #: The process in which the user's script raised.
        self.raised: SimRank | None = None
        self.raised_s = 0.0
        self._failed = False
        #: When the last fault struck.
        self.struck_s = 0.0
        self.highest_step = 0
        self.committed: set[int] = set()
        self._moved_s = 0.0
        #: Since when there has been no daemon.
        self._away_since_s: float | None = None
        self._chains: dict[int, Chain] = {-1: Chain.of_job(world.seed, world.world_size)}
        self._speakers: dict[tuple[int, int], str] = {}
        self._first_step: dict[int, int] = {}
        self._live_s: dict[int, float] = {}
        self._runners: dict[int, list[tuple[SimRank, int]]] = {}
        self._poisoned_epochs: set[int] = set()
        self._committed_epochs: set[int] = set()
        #: These, and those in which the job started from nothing: what later ones are built on.
        self._settled_epochs: set[int] = set()
        self._cut_off: set[str] = set()
        self._reports: dict[str, tuple[int, int, int, bool]] = {}
        self._targets: dict[int, int] = {}
        self._flipped: dict[int, list[Plan]] = {}
        self._kept: dict[tuple[int, int], set[int]] = {}

    def fail(self, rule: str, text: str) -> None:
        raise Violation(f"{rule}: {text}")

    # ---------------------------------------------------------------- what the faults did

    def fault_strikes(self) -> None:
        self.faults += 1
        self._moved_s = self.struck_s = self.world.now

    def touched(self, processes: Iterable[SimRank]) -> None:
        for process in processes:
            process.touched_s = self.world.now

    def partitioned(self, processes: Iterable[SimRank]) -> None:
        """From the daemon, not from one another."""
        self._cut_off.update(process.incarnation for process in processes)

    # ---------------------------------------------------------------- ranks

    def step_begins(self, rank: SimRank, boundary: Boundary) -> None:
        step, epoch = boundary.step, boundary.epoch
        self._moved_s = self.world.now
        self._speaks(epoch, rank.rank, rank.incarnation)
        self._live_s.setdefault(epoch, self.world.now)
        if epoch not in self._first_step and rank.core.members is not None:
            self._goes_on(epoch, step, rank.core.members)
        if self._first_step.setdefault(epoch, step) > step:
            self.fail(
                "2 exactly once", f"{rank.name} runs step {step} in epoch {epoch}, which began at {self._first_step[epoch]}"
            )
        state = rank.state
        if state is None or state.step != step:
            self.fail("1 bit identity", f"{rank.name} begins step {step} with the state of {state}")
        assert rank.rank is not None
        others = self._runners.setdefault(rank.rank, [])
        for other, _ in others:
            if other is not rank and other.main.attempt is not None and self._takes_part(other) and self._takes_part(rank):
                self.fail("3 one incarnation", f"{rank.name} begins step {step} while {other.name} is in {other.main.attempt}")
        if all(other is not rank for other, _ in others):
            others.append((rank, epoch))
        if step > self.highest_step:
            self.highest_step = step
            self.world.faults.reached(step)

    def _takes_part(self, process: SimRank) -> bool:
        core = process.core
        if not process.alive or process.machine.frozen or process.touched_s >= self.world.now - 0.2:
            return False
        return core.run_epoch > core.poisoned_epoch

    def _speaks(self, epoch: int, rank: int | None, incarnation: str) -> None:
        assert rank is not None
        speaker = self._speakers.setdefault((epoch, rank), incarnation)
        if speaker != incarnation:
            self.fail("3 one incarnation", f"rank {rank} in epoch {epoch} is {speaker} and {incarnation}")

    def frame_heard(self, rank: SimRank, end: End, frame: Frame, epoch: int) -> None:
        self._speaks(frame.epoch, frame.rank, frame.incarnation)
        if frame.epoch != epoch:
            self.fail(
                "3 one incarnation", f"{rank.name} in epoch {epoch} hears {frame.kind} of epoch {frame.epoch} from {frame.rank}"
            )

    def vote_ended(self, rank: SimRank, epoch: int, step: int, result: Ballot | None) -> None:
        if result is not None:
            keepers = self._kept.get((epoch, step + 1), set())
            if step < self.world.total_steps and len(keepers) < self.world.world_size:
                self.fail(
                    "2 exactly once", f"step {step} is committed in epoch {epoch} and only ranks {sorted(keepers)} keep a record"
                )
            self._moved_s = self.world.now
            self._committed_epochs.add(epoch)
            self._settled_epochs.add(epoch)
            self.committed.add(step)
            if step >= self.world.total_steps:
                self.world.note(rank.name, "the last vote says yes")

    def record_kept(self, rank: SimRank, epoch: int, step: int) -> None:
        """This rank holds its ward's record of the state before `step`."""
        assert rank.rank is not None
        self._kept.setdefault((epoch, step), set()).add(rank.rank)

    def step_applied(self, rank: SimRank, epoch: int, step: int, state: TrainingState, given: tuple[int, ...]) -> None:
        """`state` before the update, its private part after it."""
        chain = self._chain(epoch)
        assert rank.rank is not None
        if step < chain.first_step:
            self.fail("2 exactly once", f"{rank.name} applies step {step} again, the state begins at {chain.first_step}")
        if state.params != chain.params(step) or given != chain.contributions(step):
            self.fail("1 bit identity", f"{rank.name} applies other gradients or another state at step {step} in epoch {epoch}")
        if state.private != chain.private(step + 1)[rank.rank]:
            self.fail("2 exactly once", f"{rank.name} has drawn other samples at step {step} in epoch {epoch}")
        self._moved_s = self.world.now

    def _chain(self, epoch: int) -> Chain:
        return self._chains[max(first for first in self._chains if first <= epoch)]

    def status_sent(self, rank: SimRank, status: RankStatus) -> None:
        """The report of a poisoned epoch is final until a resolution changes it."""
        core = rank.core
        if status.reported_epoch < status.live_epoch or core.resolved_epoch >= status.reported_epoch or not status.has_state:
            return
        report = (status.live_epoch, core.resolved_epoch, status.next_step, status.unknown)
        before = self._reports.setdefault(rank.incarnation, report)
        if before[:2] == report[:2] and before != report:
            self.fail("report is final", f"{rank.name} reported {before[2:]} and now {report[2:]}")
        self._reports[rank.incarnation] = report

    def poisoned(self, rank: SimRank, epoch: int, reason: str) -> None:
        """The first rank that gives up an epoch in which steps were committed must have a cause among its members."""
        core = rank.core
        self.world.note(rank.name, f"is poisoned up to epoch {epoch}: {reason}")
        if core.phase == "frozen":
            return  # a leaver: the epoch that was called off is its successor's
        if core.live_epoch not in self._committed_epochs or core.live_epoch > epoch or core.live_epoch in self._poisoned_epochs:
            return
        self._poisoned_epochs.add(core.live_epoch)
        names = [name for (at, _), name in self._speakers.items() if at == core.live_epoch]
        members = [self.world.processes[name] for name in names]
        for plan in self._flipped.get(core.live_epoch, []):
            members += [self.world.processes[member.incarnation] for member in plan.successor.members.values()]
        flips = [plan for plans in self._flipped.values() for plan in plans if plan.successor.epoch == core.live_epoch]
        if any(member.incarnation in self._cut_off for plan in flips for member in plan.successor.members.values()):
            return  # to the daemon, which cannot hear the joiner, the flip is undecided: it may be called off
        since_s = self._live_s[core.live_epoch] - CAUSE_S
        if not any(process.touched_s >= since_s or not process.alive or process.machine.frozen for process in members):
            self.fail("4 and 5 no harm", f"epoch {core.live_epoch} ends though nothing hit a member: {reason} ({rank.name})")

    def goes_live(self, rank: SimRank, missing: set[Route]) -> None:
        if missing:
            self.fail(
                "linked first", f"{rank.name} goes live in epoch {rank.core.live_epoch} without its links {sorted(missing)}"
            )

    def has_closed(self, rank: SimRank) -> None:
        """Nobody waits for somebody who has given up."""
        open_ends = [end for end in rank.ends if end.epoch <= rank.core.poisoned_epoch and not end.closed]
        if open_ends:
            self.fail(
                "poison spreads",
                f"{rank.name} has given up epoch {rank.core.poisoned_epoch} and keeps {len(open_ends)} links open",
            )

    def switched(self, rank: SimRank, plan: Plan) -> None:
        if rank.staging is None or rank.staging.missing:
            self.fail("4 before the flip", f"{rank.name} flips to plan {plan.plan_id}, whose links are not staged")
        self._flipped.setdefault(plan.base_epoch, []).append(plan)
        job = self._job()
        if job is not None and job.plan == plan and not job.armed:
            self.fail("4 before the flip", f"{rank.name} flips to plan {plan.plan_id}, whose leavers are not armed")
        migration = self.world.ledger.migrations[plan.migration_id]
        if rank.touched_s < 0 and not self.job_over and migration.state in ("aborted", "failed"):
            self.fail("4 before the flip", f"{rank.name} flips to plan {plan.plan_id}, whose migration is {migration.state}")

    def retired(self, process: SimRank) -> None:
        """A leaver that has frozen may still be needed, until a step is committed without it."""
        core = process.core
        if core.phase == "frozen" and process.touched_s < 0 and max(self._committed_epochs) <= core.live_epoch:
            self.fail("4 before the flip", f"the leaver {process.name} is retired before the first yes without it")

    def still_wanted(self, process: SimRank) -> None:
        """An incarnation whose role is another's is killed by its agent soon."""
        record = self.world.ledger.ranks.get((self.world.job_id, process.incarnation))
        if record is None or record.state not in ("lost", "retired", "refused"):
            return
        if process.machine.name in self.world.partitioned or not self.world.daemon.alive:
            process.fenced_s = self.world.now
        if self.world.now - max(record.updated_s, process.fenced_s, process.touched_s) > FENCE_S:
            self.fail("3 one incarnation", f"{process.name} has been {record.state} for {FENCE_S} s and is not killed")

    # ---------------------------------------------------------------- records of small state

    def record_given_up(self, joiner: SimRank, install: Install) -> None:
        """Only a record that no living member keeps may be called lost."""
        assert joiner.rank is not None
        buddy = buddy_of(joiner.rank, self.world.world_size, self.world.nproc_per_node)
        if install.joining[joiner.rank].record_rank is not None or buddy in install.joining:
            return
        keeper = install.membership.members[buddy]
        process = self.world.processes[keeper.incarnation]
        if process.alive and not process.machine.frozen and install.target_step in process.ward_records:
            self.fail("1 bit identity", f"the record of rank {joiner.rank} is called lost, {process.name} keeps it")

    def _goes_on(self, epoch: int, step: int, members: Membership) -> None:
        """The first step of an epoch. If somebody holds approximate small state, from here on the run is that of a job in which
        this rank had continued with it, and the ledger must say so. An epoch before it in which nothing was committed does not
        count: who was lost in that may be replaced by one with the exact state."""
        chain = self._chain(max((each for each in self._settled_epochs if each <= epoch), default=-1))
        self._chains[epoch] = chain
        if step < chain.first_step:
            return
        private = list(chain.private(step))
        for rank, member in members.members.items():
            approximate = approximate_private(chain.params(step), rank)
            if self.world.processes[member.incarnation].own_records.get(step) == approximate:
                private[rank] = approximate
        inexact = [rank for rank, value in enumerate(private) if value != chain.private(step)[rank]]
        if not inexact:
            return
        job = self._job()
        if job is None or not job.approximations:
            self.fail("1 bit identity", f"rank {inexact} goes on with approximate state and the ledger does not say so")
        self._chains[epoch] = Chain(step, chain.params(step), tuple(private))

    def starts_fresh(self, epoch: int) -> None:
        """The job starts (again) from nothing."""
        self._chains.setdefault(epoch, Chain.of_job(self.world.seed, self.world.world_size))
        self._settled_epochs.add(epoch)

    # ---------------------------------------------------------------- the daemon

    def persisted(self, rows: Persist) -> None:
        for job in rows.jobs:
            if job.state == "failed" and not self._failed:
                self._failed = True
                self._gives_up(job)
        if any(migration.state == "armed" for migration in rows.migrations):
            self.world.faults.armed()
        for rank in rows.ranks:
            if rank.state == "lost":
                self._declared_lost(rank)
        note = self.world.note
        for event in rows.events:
            note("ledger", f"{event.kind} {event.subject}: {event.text}")

    def _declared_lost(self, record: RankRecord) -> None:
        process = self.world.processes.get(record.incarnation)
        if process is None or not process.alive or process.touched_s >= 0 or process.incarnation in self._cut_off:
            return
        if process.core.has_state and process.core.live_epoch >= 0 and "install" not in record.reason:
            self.fail("4 and 5 no harm", f"{process.name} is given up though nothing hit it: {record.reason}")

    def _gives_up(self, job: JobRecord) -> None:
        """Who is there at that moment must not contradict the reason."""
        there = [process for process in self.world.processes.values() if self._is_there(process)]
        if "no rank with the state" in job.reason:
            able = [process.name for process in there if process.core.has_state and process.core.live_epoch >= 0]
            if able:
                self.fail("liveness", f"the job is given up, and {able} have its state: {job.reason}")
        if "no standby came" in job.reason:
            ready = [process.name for process in there if process.core.phase == "ready"]
            held = {process.rank for process in there if process.core.live_epoch >= 0}
            if len(ready) > self.world.world_size - len(held):
                self.fail("liveness", f"the job is given up, and {ready} are ready: {job.reason}")

    def _is_there(self, process: SimRank) -> bool:
        """It lives, no fault has hit it lately, it is not fenced, and its node can be reached and is not going."""
        world = self.world
        record = world.ledger.ranks.get((world.job_id, process.incarnation))
        node = world.ledger.nodes.get((world.job_id, process.machine.name))
        if (
            record is None
            or record.state in ("lost", "retired", "refused", "exited")
            or node is None
            or node.state not in ("up", "unknown")
        ):
            return False
        calm = process.touched_s < world.now - CALM_S and process.incarnation not in self._cut_off
        return process.alive and not process.machine.frozen and calm

    def given_back(self, node: str) -> None:
        """The resource manager is asked to take a node of the job: nothing of value runs there."""
        there = self.world.ledger.nodes.get((self.world.job_id, node))
        if there is None or there.use != "released":
            self.fail("6 accounted for", f"{node} leaves the job, the ledger has {there}")
        job = self._job()
        members = job.table.members.values() if job is not None and job.table is not None and job.state == "running" else ()
        for member in members:
            if self.world.processes[member.incarnation].machine.name == node:
                self.fail("6 accounted for", f"{node} leaves the job, and {member.incarnation} trains there")

    def sent_away(self, node: str, over: JobOver) -> None:
        """The batch script waits for its own agents: the one beside it stays until the job's end."""
        slurm = self.world.slurm
        if over.node_only and slurm is not None and node == slurm.batch_host:
            self.fail("6 accounted for", f"the agent of the batch host {node} is sent away: {over.reason}")

    def released(self, node: str) -> None:
        """A node that is given back is not used any more."""
        there = self.world.ledger.nodes.get((self.world.job_id, node))
        if there is None or there.use not in ("released", "lost"):
            self.fail("6 accounted for", f"{node} is given back, the ledger has {there}")

    def directed(self, agent_id: str, node: str, directive: AgentDirective) -> None:
        """Nothing reaches a rank that is not in the ledger."""
        job = self._job()
        for spec in directive.processes:
            record = self.world.ledger.ranks.get((self.world.job_id, spec.incarnation))
            if record is not None and record.state in ("lost", "refused"):
                self.fail("3 one incarnation", f"{spec.incarnation} is {record.state} and is still to run")
        for order in directive.ranks:
            if job is None:
                self.fail("ledger first", "a rank is directed before its job is in the ledger")
                return
            self._directed(job, order)
        if directive.job_over is not None and not self.job_over:
            there = self.world.ledger.nodes.get((self.world.job_id, node))
            if there is None or (there.agent_id == agent_id and there.use not in ("released", "lost")):
                self.fail("ledger first", f"{node} is sent away, the ledger has {there}")

    def _directed(self, job: JobRecord, order: Directive) -> None:
        if order.poison_epoch > job.poison_epoch:
            self.fail("ledger first", f"poison {order.poison_epoch} is sent, the ledger has {job.poison_epoch}")
        if order.live_epoch > job.epoch:
            self.fail("ledger first", f"go for epoch {order.live_epoch} is sent, the ledger has {job.epoch}")
        if order.install is not None and order.install.membership.epoch > job.epoch_limit:
            self.fail("ledger first", f"epoch {order.install.membership.epoch} is installed, the limit is {job.epoch_limit}")
        if order.plan is not None and order.plan != job.plan:
            self.fail("ledger first", f"plan {order.plan.plan_id} is sent, the ledger has another")
        if order.armed and not job.armed:
            self.fail("ledger first", "the leavers are armed, the ledger does not know")
        resolution = order.resolution
        if resolution is not None:
            if resolution != job.resolution:
                self.fail("ledger first", f"{resolution} is sent, the ledger has {job.resolution}")
            if self._targets.setdefault(resolution.epoch, resolution.target_step) != resolution.target_step:
                self.fail("2 exactly once", f"epoch {resolution.epoch} is resolved twice")

    def _job(self) -> JobRecord | None:
        return self.world.ledger.jobs.get(self.world.job_id)

    @property
    def job_over(self) -> bool:
        job = self._job()
        return job is not None and job.state in ("done", "failed")

    # ---------------------------------------------------------------- after each event, and at the end

    def after_event(self) -> None:
        if self.world.now - self._moved_s > STALL_S:
            job = self._job()
            self.fail("liveness", f"nothing has moved for {STALL_S} s, the job is {job.state if job else 'unknown'}")
        self._goes_on_without_the_daemon()

    def _goes_on_without_the_daemon(self) -> None:
        if self.world.daemon.alive:
            self._away_since_s = None
            return
        if self._away_since_s is None:
            self._away_since_s = self.world.now
        since_s = max(self._away_since_s, self._moved_s)
        if self.world.now - since_s <= STEP_S:
            return
        newest = max(self.world.processes.values(), key=lambda process: process.core.run_epoch, default=None)
        if newest is None or newest.core.members is None or newest.core.run_epoch not in self._committed_epochs:
            return
        members = [self.world.processes[member.incarnation] for member in newest.core.members.members.values()]
        if all(process.touched_s < 0 and process.alive and process.core.phase == "running" for process in members):
            self.fail(
                "5 the daemon away", f"no step for {STEP_S} s without a daemon, and nothing hit {members[0].name} and its peers"
            )

    def at_end(self) -> None:
        job = self._job()
        if job is None or job.state not in ("done", "failed"):
            self.fail("liveness", f"everybody has left and the job is {job.state if job else 'unknown'}")
            return
        if job.state == "failed":
            self._failed_for_a_reason(job)
        else:
            self._done()
        for migration in self.world.ledger.migrations.values():
            if migration.state not in ("done", "aborted", "failed") or not (migration.reason or migration.state == "done"):
                self.fail(
                    "6 accounted for", f"{migration.migration_id} ended as {migration.state} with reason {migration.reason!r}"
                )
        for node in self.world.ledger.nodes.values():
            if node.use not in ("released", "lost"):
                self.fail("6 accounted for", f"node {node.node} ended as {node.use}")

    def _failed_for_a_reason(self, job: JobRecord) -> None:
        if not job.reason or job.exit_code in (None, 0):
            self.fail("6 accounted for", f"the job failed with code {job.exit_code} and reason {job.reason!r}")
        raised = self.raised
        was_heard = raised is not None and raised.incarnation not in self._cut_off and raised.touched_s == self.raised_s
        if was_heard and "ValueError" not in job.reason:
            self.fail("6 accounted for", f"the script raised, the job says {job.reason!r}")
        if not self.faults:
            self.fail("liveness", f"the job failed though nothing was done to it: {job.reason}")
        if "attempts to install an epoch failed" in job.reason and self._outcast():
            self.fail("liveness", f"a rank that nobody can link to kept its role to the end: {job.reason}")

    def _outcast(self) -> bool:
        """A deaf rank still has a role, although another one has the state and there is nothing else wrong."""
        members = [process for process in self.world.processes.values() if process.alive and process.rank is not None]
        stateful = [process for process in members if process.state is not None]
        return len(stateful) > 1 and any(process.deaf for process in stateful)

    def _done(self) -> None:
        """Every role was carried to its end, with the state of the undisturbed run."""
        total, ended = self.world.total_steps, set()
        for process in self.world.processes.values():
            state, rank = process.state, process.rank
            if process.core.phase != "finished" or rank is None or state is None:
                continue
            ended.add(rank)
            chain = self._chain(process.core.run_epoch)
            if (state.step, state.params, state.private) != (total, chain.params(total), chain.private(total)[rank]):
                self.fail("1 bit identity", f"{process.name} ended rank {rank} with {state}")
        if len(ended) < self.world.world_size:
            self.fail("2 exactly once", f"the job is done and only ranks {sorted(ended)} came to step {total}")
