"""How a planned migration gets its plan: standbys are chosen, or waited for; the plan is written before any rank hears of it."""

from __future__ import annotations

from tmd.core import standby
from tmd.core.job import Job
from tmd.core.planned import mark
from tmd.core.processes import Process
from tmd.core.records import MigrationRecord
from tmd.core.timings import open_window
from tmd.core.under_way import Flight
from tmd.protocol.membership import Membership, Plan


def propose(job: Job, now: float, migration: MigrationRecord) -> str:
    """Chooses the standbys and writes the plan, or says what is waited for."""
    migration_id = migration.migration_id
    if migration.state == "queued":
        migration = job.set_migration(migration_id, state="selecting")
        window = job.windows.setdefault(
            migration_id, open_window("planned", migration.started_s, job.commits, job.holders().values())
        )
        window.mark("detect", now)
        job.selecting_since_s[migration_id] = now
    chosen = _choose(job, now, migration)
    if len(chosen) < len(migration.leavers):
        return _wait_for_standby(job, now, migration)
    _write_plan(job, now, migration, chosen)
    return "plan sent"


def _choose(job: Job, now: float, migration: MigrationRecord) -> dict[int, Process]:
    wanted = job.wanted_node.get(migration.migration_id)
    failed = job.failed_joiners.get(migration.migration_id, set())
    candidates = [
        process
        for process in standby.ready(job, now)
        if process.incarnation not in failed
        and process.node not in migration.from_nodes
        and (wanted is None or process.node == wanted)
    ]
    leaving = {rank: job.processes[incarnation].node for rank, incarnation in migration.leavers.items()}
    return standby.choose(job, leaving, candidates)


def _wait_for_standby(job: Job, now: float, migration: MigrationRecord) -> str:
    since = job.selecting_since_s.setdefault(migration.migration_id, now)
    deadline = since + job.settings.plan_timeout_s
    job.wake_at(deadline)
    where = job.wanted_node.get(migration.migration_id)
    if now >= deadline:
        reason = f"no standby{f' on {where}' if where else ''} became ready in {job.settings.plan_timeout_s:g} s"
        job.end_migration(now, migration.migration_id, "aborted", reason)
        return reason
    warming = [process for process in standby.warming(job, now) if where is None or process.node == where]
    if warming:
        return f"waiting for {warming[0].node} to warm up ({warming[0].incarnation} is {warming[0].report.phase})"
    return f"waiting for a standby{f' on {where}' if where else ''}"


def _write_plan(job: Job, now: float, migration: MigrationRecord, chosen: dict[int, Process]) -> None:
    """The plan and the epoch that it reserves are in the ledger before any rank hears of it."""
    table = job.record.table
    assert table is not None, "a running job has a table"
    for rank, process in chosen.items():
        job.set_process(now, process, state="joiner", rank=rank)
        job.set_process(now, job.processes[migration.leavers[rank]], state="leaver")
    members = {**table.members, **{rank: process.member() for rank, process in chosen.items()}}
    plan_id, epoch = job.record.plan_counter + 1, job.record.epoch_limit + 1
    plan = Plan(
        plan_id=plan_id,
        migration_id=migration.migration_id,
        base_epoch=table.epoch,
        leavers=dict(migration.leavers),
        sources={rank: table.members[rank] for rank in migration.leavers},
        successor=Membership(epoch=epoch, members=members),
    )
    job.flight = Flight(now)
    job.evolve(now, plan=plan, armed=False, plan_counter=plan_id, epoch_limit=epoch)
    job.set_migration(
        migration.migration_id,
        state="preparing",
        plan_id=plan_id,
        joiners={rank: process.incarnation for rank, process in chosen.items()},
        to_nodes=tuple(sorted({process.node for process in chosen.values()})),
    )
    moves = ", ".join(f"rank {rank} to {process.incarnation} on {process.node}" for rank, process in sorted(chosen.items()))
    job.tell(now, migration.migration_id, "planned", f"plan {plan_id}, epoch {table.epoch} to {epoch}: {moves}")
    mark(job, "select", now)
