"""A planned migration's plan, from its staging to the leaver's retirement: stage, arm, flip, copy, done. Before the plan is
armed it can be dropped at will; after that only a leaver's word says that it will not flip, or an epoch that it has. How it
comes about is in `proposing`."""

from __future__ import annotations

from tmd.core import releasing, words
from tmd.core.job import Job
from tmd.core.poison import call_off, note_loss
from tmd.core.processes import Process
from tmd.core.records import MigrationRecord
from tmd.core.under_way import Flight
from tmd.protocol.membership import Plan


def joiners(job: Job) -> dict[int, Process]:
    """Rank -> joiner of the outstanding plan."""
    plan = job.record.plan
    if plan is None:
        return {}
    return {rank: job.processes[plan.successor.members[rank].incarnation] for rank in sorted(plan.leavers)}


def leavers(job: Job) -> dict[int, Process]:
    """Rank -> leaver of the outstanding plan."""
    plan = job.record.plan
    return {rank: job.processes[incarnation] for rank, incarnation in sorted(plan.leavers.items())} if plan is not None else {}


# -------------------------------------------------------------------- the way to the flip


def take_evidence(job: Job, now: float) -> None:
    """What the ranks' reports show of the outstanding plan: that it has flipped, or that a step was committed after it. The
    latter counts in a recovery, too; of a flip alone the recovery makes what is best (see `settle`)."""
    plan, flight = job.record.plan, job.flight
    if plan is None or flight is None:
        return
    processes = [*job.holders().values(), *joiners(job).values()]
    if any(process.report.committed_epoch >= plan.successor.epoch for process in processes):
        _complete(job, now)
    elif flight.flipped_s is None and not job.called_off and any(_shows_flip(process, plan) for process in processes):
        _note_flip(job, now, flight)


def watch(job: Job, now: float) -> str:
    """Takes the next step with the outstanding plan."""
    plan, flight = job.record.plan, job.flight
    assert plan is not None
    assert flight is not None
    if flight.flipped_s is not None:
        return _watch_copy(job, now, flight, flight.flipped_s)
    if flight.withdrawn:
        return _conclude_withdrawal(job, now, flight)
    trouble = _joiner_trouble(job, now) or _staging_trouble(job)
    if trouble is not None:
        return withdraw(job, now, trouble, retry=True)
    deadline = flight.since_s + job.settings.plan_timeout_s
    job.wake_at(deadline)
    if now >= deadline:
        return withdraw(job, now, f"it has not flipped for {job.settings.plan_timeout_s:g} s: {_missing(job, plan)}")
    return _advance(job, now, plan)


def _advance(job: Job, now: float, plan: Plan) -> str:
    migration = job.flying()
    assert migration is not None
    if migration.state == "preparing" and all(process.report.rank == rank for rank, process in joiners(job).items()):
        mark(job, "prepare", now)
        migration = job.set_migration(migration.migration_id, state="installing")
        job.tell(now, migration.migration_id, "prepared", "every joiner has taken its role")
    if not job.record.armed and not _unstaged(job, plan) and not _unreachable_joiners(job):
        mark(job, "install", now)
        job.evolve(now, armed=True)
        job.set_migration(migration.migration_id, state="armed")
        job.tell(now, migration.migration_id, "armed", "every link is staged: the leavers may flip")
    return _missing(job, plan)


def _unstaged(job: Job, plan: Plan) -> list[Process]:
    everybody = [*job.holders().values(), *joiners(job).values()]
    return [process for process in everybody if process.report.staged_plan != plan.plan_id]


def _unreachable_joiners(job: Job) -> list[Process]:
    """A joiner whose agent is away may be dead: nobody flips to it."""
    return [process for process in joiners(job).values() if not job.is_connected(process)]


def _missing(job: Job, plan: Plan) -> str:
    """What the plan waits for."""
    if job.record.armed:
        return "armed: waiting for the vote that flips"
    for process in _unreachable_joiners(job):
        return f"waiting for the agent of {process.node} to come back"
    for rank, process in joiners(job).items():
        if process.report.rank != rank:
            return f"waiting for {process.incarnation} on {process.node} to take rank {rank}"
    return f"waiting for the links of {', '.join(job.name(process) for process in _unstaged(job, plan)[:4])}"


def _shows_flip(process: Process, plan: Plan) -> bool:
    report = process.report
    return report.flipped_plan == plan.plan_id or max(report.run_epoch, report.live_epoch) >= plan.successor.epoch


def _joiner_trouble(job: Job, now: float) -> str | None:
    """Why a joiner cannot go on, or None."""
    plan = job.record.plan
    assert plan is not None
    for process in joiners(job).values():
        if not process.active:
            return f"the joiner {process.incarnation} on {process.node} was lost: {process.record.reason}"
        if process.report.dropped_plan >= plan.plan_id or process.report.failed_epoch >= plan.successor.epoch:
            why = process.report.reason or "no reason given"
            return f"the joiner {process.incarnation} on {process.node} stepped back: {why}"
        patience_s = job.settings.heartbeat_timeout_s if job.is_connected(process) else job.settings.agent_grace_s
        silence_s = job.silence_s(process, now)
        if silence_s >= patience_s:
            return f"the agent of the joiner {process.incarnation} on {process.node} has been away for {silence_s:.1f} s"
        job.wake_at(now + patience_s - silence_s)
    return None


def _staging_trouble(job: Job) -> str | None:
    """Why a member will not stage its links to a joiner, or None."""
    plan = job.record.plan
    assert plan is not None
    for process in job.holders().values():
        if process.report.dropped_plan >= plan.plan_id:
            return f"{job.name(process)} dropped the plan: {process.report.reason or 'no reason given'}"
    return None


# -------------------------------------------------------------------- the flip and after


def _note_flip(job: Job, now: float, flight: Flight) -> None:
    migration = job.flying()
    assert migration is not None
    flight.flipped_s = now
    job.set_migration(migration.migration_id, state="copying")
    text = "the leavers are frozen and hand their state over"
    if flight.withdrawn:
        text += f" (too late to call it off: {flight.withdrawn})"
    job.tell(now, migration.migration_id, "flipped", text)


def _watch_copy(job: Job, now: float, flight: Flight, flipped_s: float) -> str:
    """Between the flip and the first yes with the joiner: any trouble now is a recovery, in which the leaver can go on."""
    migration = job.flying()
    assert migration is not None
    trouble = _joiner_trouble(job, now)
    deadline = flipped_s + job.settings.plan_timeout_s
    job.wake_at(deadline)
    if trouble is None and now >= deadline:
        trouble = f"the joiner's first step was not committed in {job.settings.plan_timeout_s:g} s"
    if trouble is not None:
        call_off(job, now, trouble, sign_s=now, cause=job.last_about(migration.migration_id))
        return trouble
    without = [job.name(process) for process in joiners(job).values() if not process.report.has_state]
    return f"copying the state to {', '.join(without)}" if without else "waiting for the first step with the joiner"


def _complete(job: Job, now: float) -> None:
    """The first yes with the joiner: the leaver is not needed any more."""
    plan, migration = job.record.plan, job.flying()
    assert plan is not None
    assert migration is not None
    if migration.state != "copying":
        job.set_migration(migration.migration_id, state="copying")
    gone = leavers(job)
    arrived = joiners(job)
    lost = {rank: process for rank, process in arrived.items() if not process.active}
    for rank, process in arrived.items():
        job.give_role(rank, process)
        if job.recovery is not None:
            job.recovery.lost.pop(rank, None)
        if process.active:
            job.set_process(now, process, state="member")
    job.evolve(now, epoch=plan.successor.epoch, table=plan.successor, plan=None, armed=False)
    job.flight = None
    conclude(job, now, migration, plan, gone, f"{words.ranks(gone)} moved")

    for rank, process in lost.items():
        sign, event = f"{job.name(process)} is lost: {process.record.reason}", job.last_about(process.incarnation)
        call_off(job, now, sign, sign_s=now, cause=event)
        note_loss(job, rank, process, sign, event)
        job.vacate(rank)


def conclude(job: Job, now: float, migration: MigrationRecord, plan: Plan, gone: dict[int, Process], reason: str) -> None:
    """Leavers are retired, their nodes given back if no other rank lives there."""
    window = job.windows.get(migration.migration_id)
    if window is not None:
        window.epoch = plan.successor.epoch
        window.joiners = tuple(migration.joiners.values())
        window.counters |= {incarnation: {} for incarnation in window.joiners}
    origins = {job.processes[incarnation].report.record_origin for incarnation in migration.joiners.values()}
    job.set_migration(migration.migration_id, record_origin=", ".join(sorted(origins - {""})))
    cause = job.last_about(migration.migration_id)
    for process in gone.values():
        if process.active:
            job.retire(now, process, f"replaced by migration {migration.migration_id}", cause)
    for incarnation in migration.joiners.values():
        job.set_node(now, job.processes[incarnation].node, use="training")
    job.end_migration(now, migration.migration_id, "done", reason)
    for node in sorted({process.node for process in gone.values()}):
        if not job.ranks_on(node) and job.nodes[node].use == "training":
            releasing.vacate(
                job, now, node, f"migration {migration.migration_id} is done", job.last_about(migration.migration_id)
            )


# -------------------------------------------------------------------- calling it off


def withdraw(job: Job, now: float, reason: str, *, retry: bool = False) -> str:
    """The plan is called off. Once it is armed a leaver's word is needed: the vote under way may carry the flip."""
    flight, migration = job.flight, job.flying()
    assert flight is not None
    assert migration is not None
    if flight.withdrawn:
        return f"being called off: {flight.withdrawn}"
    flight.withdrawn, flight.retry = reason, retry
    job.stale = True
    job.set_migration(migration.migration_id, reason=reason)
    job.tell(now, migration.migration_id, "withdrawn", f"called off: {reason}")
    return _conclude_withdrawal(job, now, flight)


def _conclude_withdrawal(job: Job, now: float, flight: Flight) -> str:
    plan, migration = job.record.plan, job.flying()
    assert plan is not None
    assert migration is not None
    acknowledged = [process for process in leavers(job).values() if process.report.dropped_plan >= plan.plan_id]
    if job.record.armed and not acknowledged:
        return f"being called off: {flight.withdrawn}; waiting for a leaver's word"
    dissolve(job, now)
    if flight.retry and migration.attempt < job.settings.migration_attempts:
        _try_another(job, now, migration)
        return f"trying another standby: {flight.withdrawn}"
    job.end_migration(now, migration.migration_id, "aborted", flight.withdrawn)
    return flight.withdrawn


def dissolve(job: Job, now: float) -> None:
    """There is no plan any more, and it has not flipped: everybody is what they were before."""
    for process in leavers(job).values():
        if process.active:
            job.set_process(now, process, state="member")
    for process in joiners(job).values():
        step_back(job, now, process)
    job.flight = None
    if job.record.plan is not None:
        job.evolve(now, plan=None, armed=False)


def _try_another(job: Job, now: float, migration: MigrationRecord) -> None:
    job.failed_joiners.setdefault(migration.migration_id, set()).update(migration.joiners.values())
    job.selecting_since_s[migration.migration_id] = now
    job.set_migration(
        migration.migration_id, state="selecting", joiners={}, to_nodes=(), plan_id=0, reason="", attempt=migration.attempt + 1
    )
    job.tell(now, migration.migration_id, "retry", f"attempt {migration.attempt + 1}: another standby is looked for")


def step_back(job: Job, now: float, process: Process) -> None:
    """A joiner that is not needed: a standby again, or fenced if it has held the state of the role."""
    if not process.active:
        return
    if process.touched:
        job.retire(now, process, "it has held the state of a role that it did not get")
        return
    job.set_process(now, process, state="standby", rank=None)
    job.tell(now, process.incarnation, "standby", f"{process.incarnation} on {process.node} is a standby again")


def settle(job: Job, now: float, target_step: int, cause: int) -> None:
    """A recovery decides what becomes of the outstanding plan. For each role the leaver goes on if it lives and is at the target
    step; else the joiner takes it, with its state if it has it, else with that of a survivor."""
    plan, migration = job.record.plan, job.flying()
    if plan is None or migration is None:
        return
    assert job.recovery is not None
    reason = f"an unplanned failure came first: {_sign(job)}"
    arrived: dict[int, Process] = {}
    for (rank, leaver), joiner in zip(leavers(job).items(), joiners(job).values(), strict=True):
        if leaver.active and leaver.can_reach(target_step):
            job.give_role(rank, leaver)
            job.set_process(now, leaver, state="member")
            step_back(job, now, joiner)
        elif joiner.active and (joiner.can_reach(target_step) or not joiner.touched):
            job.give_role(rank, joiner)
            if joiner.touched:
                arrived[rank] = leaver
                job.recovery.lost.pop(rank, None)
            else:
                _replace_leaver(job, now, rank, leaver)
        else:
            job.vacate(rank)
            _replace_leaver(job, now, rank, leaver)
            step_back(job, now, joiner)
    job.flight = None
    if len(arrived) == len(plan.leavers):
        conclude(job, now, migration, plan, arrived, "the flip had happened: a recovery completed it")
        return
    for leaver in arrived.values():
        if leaver.active:
            job.retire(now, leaver, "its joiner has its state")
    job.end_migration(now, migration.migration_id, "aborted", reason, cause)


def _sign(job: Job) -> str:
    """What was seen first. A peer may have been faster than the agent of a joiner that was lost, and then names only its rank."""
    assert job.recovery is not None
    sign = job.recovery.sign
    gone = [joiner for joiner in joiners(job).values() if not joiner.active and joiner.incarnation not in sign]
    told = [f"the joiner {joiner.incarnation} on {joiner.node} was lost: {joiner.record.reason}" for joiner in gone]
    return "; ".join([sign, *told])


def _replace_leaver(job: Job, now: float, rank: int, leaver: Process) -> None:
    """The leaver cannot go on: its role goes to a joiner as in any unplanned loss."""
    assert job.recovery is not None
    job.recovery.lost.setdefault(rank, leaver.incarnation)
    if leaver.active:
        job.retire(now, leaver, "it does not have the state of the step that the job goes on from")


def mark(job: Job, name: str, moment_s: float) -> None:
    """A phase of the migration under way has ended."""
    migration = job.flying()
    window = job.windows.get(migration.migration_id) if migration is not None else None
    if window is not None:
        window.mark(name, moment_s)
