"""What must hold among the records of a ledger, whatever daemon wrote it. Pure: records in, sentences out.

Each sentence names the record and what does not hold. The simulator asks after everything that the daemon's core writes, so a
sentence means damage, a hand in the database, or a bug.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from tmd.core.records import PHASES, JobRecord, LedgerSnapshot, MigrationRecord, NodeRecord, RankRecord
from tmd.ledger.reading import JOB_ENDED, MIGRATION_ENDED


def contradictions(ledger: LedgerSnapshot) -> Iterator[str]:
    """`ledger`: all of it, not what a daemon reads at its start."""
    ranks: dict[str, dict[str, RankRecord]] = collections.defaultdict(dict)
    migrations: dict[str, list[MigrationRecord]] = collections.defaultdict(list)
    for rank in ledger.ranks:
        ranks[rank.job_id][rank.incarnation] = rank
    for migration in ledger.migrations:
        migrations[migration.job_id].append(migration)
    for job in ledger.jobs:
        yield from _of_job(job)
        yield from _of_roles(job, ranks[job.job_id])
        yield from _of_migrations(job, migrations[job.job_id], ranks[job.job_id])
    yield from _orphans(ledger, {job.job_id for job in ledger.jobs})


def _of_job(job: JobRecord) -> Iterator[str]:
    name = f"job {job.job_id}"
    if job.world_size != job.nnodes * job.nproc_per_node:
        yield f"{name}: {job.nnodes} nodes with {job.nproc_per_node} ranks each are not {job.world_size} ranks"
    for what, epoch in (("epoch", job.epoch), ("poisoned epoch", job.poison_epoch)):
        if epoch > job.epoch_limit:
            yield f"{name}: {what} {epoch} was never given out, the last one was {job.epoch_limit}"
    if job.state == "running":
        if job.table is None or job.table.epoch != job.epoch:
            yield f"{name}: it runs in epoch {job.epoch} without that epoch's table"
        if job.epoch <= job.poison_epoch:
            yield f"{name}: it runs in epoch {job.epoch}, which was called off"
    if job.armed and job.plan is None:
        yield f"{name}: it is armed without a plan"
    if job.plan is not None and job.plan.base_epoch != job.epoch:
        yield f"{name}: its plan is for epoch {job.plan.base_epoch}, it is in epoch {job.epoch}"
    if job.state in JOB_ENDED and (job.exit_code is None or not job.reason):
        yield f"{name}: it has ended without an exit code or a reason"


def _of_roles(job: JobRecord, ranks: dict[str, RankRecord]) -> Iterator[str]:
    name = f"job {job.job_id}"
    for title, table in (("table", job.table), ("plan", job.plan.successor if job.plan is not None else None)):
        if table is None:
            continue
        if set(table.members) != set(range(job.world_size)):
            yield f"{name}: its {title} has the ranks {sorted(table.members)}, the job has {job.world_size}"
        for member in table.members.values():
            if member.incarnation not in ranks:
                yield f"{name}: its {title} names the incarnation {member.incarnation}, of which there is no record"
    members = collections.Counter(rank.rank for rank in ranks.values() if rank.state == "member")
    for number, count in members.items():
        if count > 1 and job.state not in JOB_ENDED:
            yield f"{name}: {count} incarnations are members with rank {number}"
    for rank in ranks.values():
        if rank.rank is not None and not 0 <= rank.rank < job.world_size:
            yield f"incarnation {rank.incarnation}: rank {rank.rank} of {job.world_size}"


def _of_migrations(job: JobRecord, migrations: list[MigrationRecord], ranks: dict[str, RankRecord]) -> Iterator[str]:
    moving: dict[int, str] = {}
    for migration in migrations:
        name = f"migration {migration.migration_id}"
        ended = migration.state in MIGRATION_ENDED
        if ended != (migration.ended_s is not None) or (ended and not migration.reason):
            yield f"{name}: it is {migration.state}, its end is {migration.ended_s}, its reason {migration.reason!r}"
        if not ended and job.state in JOB_ENDED:
            yield f"{name}: it is {migration.state}, and its job {job.job_id} has ended"
        # One that waits, for its turn or to be tried again, has no joiner and may be overtaken by the loss of its rank.
        for rank in () if ended else migration.joiners:
            if rank in moving:
                yield f"{name}: rank {rank} of job {job.job_id} is moving in {moving[rank]} as well"
            moving[rank] = migration.migration_id
        for rank, incarnation in [*migration.leavers.items(), *migration.joiners.items()]:
            if incarnation not in ranks or not 0 <= rank < job.world_size:
                yield f"{name}: there is no rank {rank} or no record of the incarnation {incarnation} in job {job.job_id}"
        if unknown := set(migration.phases_s) - set(PHASES):
            yield f"{name}: it has times of unknown phases: {', '.join(sorted(unknown))}"


def _orphans(ledger: LedgerSnapshot, job_ids: set[str]) -> Iterator[str]:
    owned: list[RankRecord | NodeRecord | MigrationRecord] = [*ledger.ranks, *ledger.nodes, *ledger.migrations]
    for record in owned:
        if record.job_id not in job_ids:
            yield f"{_named(record)}: there is no record of its job {record.job_id}"


def _named(record: RankRecord | NodeRecord | MigrationRecord) -> str:
    match record:
        case RankRecord():
            return f"incarnation {record.incarnation}"
        case NodeRecord():
            return f"node {record.node}"
        case MigrationRecord():
            return f"migration {record.migration_id}"
