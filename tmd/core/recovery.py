"""Recovery: from a called-off epoch to the next that runs. Everybody reports, the undecided step is decided once and for all,
every vacant role gets a joiner, the new epoch is installed. Each of these may be cut short by a further loss and goes on from
the whole state."""

from __future__ import annotations

from tmd.core import forming, installing, launching, planned, sourcing, standby, words
from tmd.core.ending import EXIT_GIVEN_UP, fail_job
from tmd.core.job import Job
from tmd.core.losses import lose
from tmd.core.poison import call_off
from tmd.core.processes import Process
from tmd.core.records import MigrationRecord
from tmd.core.timings import open_window
from tmd.core.under_way import Recovery
from tmd.protocol.membership import Install, Resolution, Source


def notice_trouble(job: Job, now: float) -> None:
    """In a running job: somebody is poisoned, or silent while nothing moves. (Losses call the epoch off themselves.)"""
    poisoned = [process for process in job.holders().values() if _gave_up(job, process)]
    if poisoned:
        # Who was first knows why; the others only saw it stop.
        first = min(poisoned, key=lambda process: process.report.stamps.get("poisoned", now))
        sign = f"{job.name(first)} gave the step up: {first.report.reason or 'no reason given'}"
        call_off(job, now, sign, sign_s=min(first.report.stamps.get("poisoned", now), now))


def _gave_up(job: Job, process: Process) -> bool:
    return process.report.poisoned_epoch >= job.record.epoch and process.report.phase not in ("finished", "frozen")


def advance(job: Job, now: float) -> str:
    """Does the next thing for a job that is recovering and says what it waits for."""
    recovery = job.recovery
    if recovery is None:
        return "running"
    if recovery.must_restart:
        return _restart(job, now, f"{recovery.sign}, and {recovery.must_restart}")
    if not job.resolved():
        waiting = _wait_for_reports(job, now)
        waiting = waiting or _wait_for_word(job, now, recovery)
        if waiting is not None:
            return waiting
        _resolve(job, now)
        if job.record.state != "recovering":
            return job.record.reason
    _keep_migration(job, now, recovery)
    if job.vacant():
        sentence = _fill_vacancies(job, now, recovery)
        if sentence is not None:
            return sentence
    job.vacant_since_s = None
    _keep_migration(job, now, recovery)
    if job.attempt is None:
        return _start_attempt(job, now, recovery)
    if installing.is_linked(job):
        return _conclude(job, now, recovery)
    return installing.check(job, now) or "trying the installation again"


def _restart(job: Job, now: float, reason: str) -> str:
    forming.restart(job, now, reason)
    return job.record.reason if job.over else f"starting again from nothing: {reason}"


# -------------------------------------------------------------------- reports and the resolution


def _witnesses(job: Job) -> list[Process]:
    """All living processes that may have run in the epochs in question: the members, and the joiners of an outstanding plan."""
    witnesses = [process for process in job.holders().values() if process.active]
    if job.record.plan is not None:
        witnesses += [process for process in planned.joiners(job).values() if process.active]
    return witnesses


def _wait_for_reports(job: Job, now: float) -> str | None:
    """A sentence while a living witness owes its final report. Who owes it for too long is lost; if its agent is what is away,
    losses.py says when that is a loss."""
    recovery = job.recovery
    assert recovery is not None
    _lose_joiners_without_agent(job, now, recovery)
    owing = [process for process in _witnesses(job) if not _has_reported(job, process)]
    if not owing:
        return None
    deadline = recovery.since_s + job.settings.report_timeout_s
    if now < deadline:
        job.wake_at(deadline)
        return f"waiting for the report of {', '.join(job.name(process) for process in owing[:4])}"
    for process in owing:
        speaks = job.is_connected(process) and job.silence_s(process, now) < job.settings.heartbeat_timeout_s / 2
        if speaks or process.record.state == "joiner":
            lose(job, now, process, f"it did not report for {job.settings.report_timeout_s:g} s", recovery.cause)
    away = [process.node for process in owing if process.active]
    return f"waiting for the agents of {', '.join(sorted(set(away)))}" if away else None


def _lose_joiners_without_agent(job: Job, now: float, recovery: Recovery) -> None:
    """The joiners of a plan hold no role, so losses.py has no word on their agents: they get as long as a member's."""
    if job.record.plan is None:
        return
    for process in planned.joiners(job).values():
        if not process.active or job.is_connected(process) or _has_reported(job, process):
            continue
        left_s = job.settings.agent_grace_s - job.silence_s(process, now)
        if left_s > 0:
            job.wake_at(now + left_s)
        else:
            lose(job, now, process, "the connection of its agent closed", recovery.cause)


def _has_reported(job: Job, process: Process) -> bool:
    return process.report.reported_epoch >= job.record.poison_epoch or process.report.phase == "finished"


def _wait_for_word(job: Job, now: float, recovery: Recovery) -> str | None:
    """A sentence while nobody with the state is left and the resource manager may still say that it has ended the job."""
    if job.allocation is None or not job.allocation.live or _steps(job):
        return None
    deadline = recovery.since_s + job.settings.heartbeat_timeout_s
    job.wake_at(deadline)
    return "no rank is left: waiting for the resource manager's word on the job" if now < deadline else None


def _steps(job: Job) -> list[int]:
    """The next step of every living witness that has the state."""
    return [
        process.report.next_step for process in _witnesses(job) if process.report.has_state or process.report.phase == "warming"
    ]


def _resolve(job: Job, now: float) -> None:
    """Decides the undecided step: the furthest living witness is right, because a yes anywhere proves it everywhere. A lost
    rank that alone applied does not count."""
    recovery = job.recovery
    assert recovery is not None
    steps = _steps(job)
    if not steps:
        _nobody_is_left(job, now, recovery)
        return
    target = max(steps)
    resolution = Resolution(epoch=job.record.poison_epoch, target_step=target)
    _count_break(job, target)
    if job.broken_times >= job.settings.step_attempts:
        times = f"step {target} was broken off {job.broken_times} times in a row, so replacing ranks does not help"
        fail_job(job, now, 1, f"{times}; the last time: {recovery.sign}")
        return
    event = job.tell(now, job.job_id, "resolved", f"{recovery.sign}: the job goes on from step {target}", recovery.cause)
    recovery.cause = event
    planned.settle(job, now, target, event)
    job.evolve(now, resolution=resolution, plan=None, armed=False)
    for rank, process in job.holders().items():
        if process.active and not process.joining and not process.can_reach(target) and process.report.phase != "finished":
            lose(job, now, process, f"it is at step {process.report.next_step} and cannot come to step {target} with rank {rank}")


def _count_break(job: Job, target: int) -> None:
    """The recoveries that came to the same step. Their sum is forgotten with the daemon: it will be reached again."""
    job.broken_times = job.broken_times + 1 if target == job.broken_step else 1
    job.broken_step = target


def _nobody_is_left(job: Job, now: float, recovery: Recovery) -> None:
    if job.commits.next_step == 0:
        _restart(job, now, f"{recovery.sign}, and no rank with its state is left")
    else:
        heard = job.commits.next_step  # ranks may have been ahead of what they had reported
        fail_job(job, now, EXIT_GIVEN_UP, f"{recovery.sign}, and no rank with the state is left (last heard of: step {heard})")


# -------------------------------------------------------------------- joiners


def _keep_migration(job: Job, now: float, recovery: Recovery) -> None:
    """A recovery that replaces somebody is a migration; its record says whom and by whom."""
    if not recovery.lost:
        return
    migration = _migration(job) or _new_migration(job, now, recovery)
    leavers = {**recovery.lost, **migration.leavers}
    joiners = dict(migration.joiners)
    attempt = migration.attempt
    for rank, process in job.holders().items():
        if rank in leavers and process.record.state == "joiner" and joiners.get(rank) != process.incarnation:
            attempt += rank in joiners
            joiners[rank] = process.incarnation
    changes = {
        "leavers": leavers,
        "joiners": joiners,
        "attempt": attempt,
        "from_nodes": _nodes(job, leavers),
        "to_nodes": _nodes(job, joiners),
    }
    if any(getattr(migration, name) != value for name, value in changes.items()):
        job.set_migration(migration.migration_id, **changes)


def _nodes(job: Job, incarnations: dict[int, str]) -> tuple[str, ...]:
    return tuple(sorted({job.processes[incarnation].node for incarnation in incarnations.values()}))


def _migration(job: Job) -> MigrationRecord | None:
    return next((migration for migration in job.open_migrations() if migration.kind == "unplanned"), None)


def _new_migration(job: Job, now: float, recovery: Recovery) -> MigrationRecord:
    migration_id = f"m{job.journal.next_event_id()}"
    started_s = _first_sign_s(job, recovery)
    job.tell(
        now, migration_id, "recovery", f"{words.ranks(sorted(recovery.lost))} must be replaced: {recovery.sign}", recovery.cause
    )
    migration = MigrationRecord(
        migration_id=migration_id,
        job_id=job.job_id,
        kind="unplanned",
        state="selecting",
        leavers=dict(recovery.lost),
        trigger=recovery.sign,
        started_s=started_s,
    )
    job.add_migration(migration)
    window = open_window("unplanned", started_s, job.commits, job.holders().values())
    window.mark("detect", recovery.since_s)
    job.windows[migration_id] = window
    return migration


def _first_sign_s(job: Job, recovery: Recovery) -> float:
    """When the loss was first noticed anywhere: an exit seen, a link that broke, a last word. Nobody stamps the moment at which a
    machine lost power: the time until its peers notice is in the downtime alone."""
    exits = [status.exit_seen_s for lost in recovery.lost.values() if (status := job.processes[lost].status) is not None]
    poisons = [
        process.report.stamps.get("poisoned", 0.0)
        for process in job.holders().values()
        if process.report.reported_epoch >= job.record.poison_epoch
    ]
    return min((sign_s for sign_s in (recovery.sign_s, *exits, *poisons) if sign_s > 0), default=recovery.since_s)


def _fill_vacancies(job: Job, now: float, recovery: Recovery) -> str | None:
    """Gives vacant roles to standbys. A sentence while one stays vacant."""
    if job.settings.observe_only:
        _refuse_to_act(job, now, recovery)
        return job.record.reason
    leaving = {rank: job.processes[recovery.lost[rank]].node for rank in job.vacant() if rank in recovery.lost}
    for rank, process in standby.choose(job, leaving, standby.ready(job, now)).items():
        _assign(job, now, rank, process, recovery)
    vacant = job.vacant()
    if not vacant:
        return None
    standby.keep_warm(job, now)
    if job.is_vacant_too_long(now):
        fail_job(job, now, EXIT_GIVEN_UP, f"{recovery.sign}, and no standby came in {job.settings.hold_limit_s:g} s")
        return job.record.reason
    return f"{words.ranks(vacant)} {'has' if len(vacant) == 1 else 'have'} no holder: {_hope(job, now)}"


def _hope(job: Job, now: float) -> str:
    """What a vacant role waits for."""
    warming = standby.warming(job, now)
    if warming:
        return f"waiting for {warming[0].node} to warm up ({warming[0].incarnation} is {warming[0].report.phase})"
    starting = [node for node in job.launches if launching.sentence(job, node)]
    if starting:
        return f"waiting for a standby on {starting[0]}: {launching.sentence(job, starting[0])}"
    return "waiting for a standby; start tmd-run on another node or bring one back"


def _assign(job: Job, now: float, rank: int, process: Process, recovery: Recovery) -> None:
    migration = _migration(job)
    assert migration is not None, "a vacant role belongs to a migration"
    job.give_role(rank, process)
    job.set_process(now, process, state="joiner", rank=rank)
    job.set_migration(migration.migration_id, state="preparing")
    job.tell(
        now, migration.migration_id, "selected", f"{process.incarnation} on {process.node} takes rank {rank}", recovery.cause
    )


def _refuse_to_act(job: Job, now: float, recovery: Recovery) -> None:
    """Observe-only: the job ends as it would have without tmd."""
    would = standby.ready(job, now)
    plan = f"it would have used {would[0].incarnation} on {would[0].node}" if would else "there was no standby it could have used"
    fail_job(job, now, 1, f"{recovery.sign}; tmd only observes, {plan}")


# -------------------------------------------------------------------- installing


def _start_attempt(job: Job, now: float, recovery: Recovery) -> str:
    early = installing.wait_to_retry(job, now)
    if early is not None:
        return early
    if job.failed_attempts and now - recovery.since_s >= job.settings.hold_limit_s:
        failed = f"{job.failed_attempts} attempts to install an epoch failed, the last one because {job.last_failure}"
        fail_job(job, now, EXIT_GIVEN_UP, f"{recovery.sign}, and {failed}")
        return job.record.reason
    assert job.record.resolution is not None
    target = job.record.resolution.target_step
    joining = _sources(job, target, recovery)
    if any(source.replica_rank is None for source in joining.values()):
        _nobody_is_left(job, now, recovery)
        return job.record.reason
    installing.start(job, now, fresh=False, target_step=target, joining=joining)
    migration = _migration(job)
    if migration is not None:
        job.set_migration(migration.migration_id, state="installing")
        window = job.windows.get(migration.migration_id)
        if window is not None:
            window.mark("select", now)
    return f"installing epoch {job.record.epoch_limit}"


def _sources(job: Job, target: int, recovery: Recovery) -> dict[int, Source]:
    """Where each joiner takes its role's state from: tensors from living replicas, the record of small state from its buddy."""
    living = {rank: process.node for rank, process in job.holders().items() if process.can_reach(target)}
    joiners = job.holders().keys() - living.keys()
    found = {}
    near = sourcing.nearness({name: node.labels for name, node in job.nodes.items()}, recovery.failed_nodes)
    for rank, replicas in sourcing.choose(joiners, living, near, job.failed_attempts).items():
        buddy = job.buddy(rank)
        found[rank] = Source(
            replica_rank=replicas[0] if replicas else None,
            other_replicas=tuple(replicas[1:]),
            record_rank=buddy if buddy != rank and buddy in living else None,
        )
    return found


def _conclude(job: Job, now: float, recovery: Recovery) -> str:
    """Everybody is linked: what a joiner could not get exactly is said, then the job goes on."""
    attempt = job.attempt
    assert attempt is not None
    # Also who loaded in an attempt before this one, and so does not join this one: it has not run with that state yet.
    inexact = [
        process
        for process in job.holders().values()
        if process.record.state != "member" and process.report.record_origin in ("approximate", "missing")
    ]
    if inexact and attempt.install.target_step == 0:
        lost = f"the small state of {job.name(inexact[0])} was lost before the first step"
        return _restart(job, now, f"{recovery.sign}, and {lost}")
    lines = tuple(_approximation(job, attempt.install, process) for process in inexact)
    event = installing.go(job, now)
    if lines:
        job.evolve(now, approximations=(*job.record.approximations, *lines))
    job.recovery = None
    for migration in job.open_migrations():
        if migration.kind == "unplanned":
            _migration_done(job, now, migration, event)
    return "running"


def _approximation(job: Job, install: Install, process: Process) -> str:
    """What of a joiner's state is not exactly that of the lost rank, and why."""
    rank = process.record.rank
    source = install.joining.get(rank) if rank is not None else None
    alone = source is not None and source.record_rank is not None
    why = "what it changed after its last vote was lost with it" if alone else "it was lost together with its buddy"
    origin = process.report.record_origin
    return f"step {install.target_step}: RNG, data position and buffers of {job.name(process)} are {origin}, because {why}"


def _migration_done(job: Job, now: float, migration: MigrationRecord, event: int) -> None:
    window = job.windows.get(migration.migration_id)
    if window is not None:
        window.epoch = job.record.epoch
        window.joiners = tuple(migration.joiners.values())
        window.counters |= {incarnation: {} for incarnation in window.joiners}
    origins = {job.processes[incarnation].report.record_origin for incarnation in migration.joiners.values()}
    job.set_migration(migration.migration_id, state="copying", record_origin=", ".join(sorted(origins - {""})))
    job.tell(now, migration.migration_id, "go", f"epoch {job.record.epoch} runs with the joiners", event)
