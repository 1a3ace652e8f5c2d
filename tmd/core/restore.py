"""A job as the ledger remembers it: the state that a restarted daemon carries on with."""

from __future__ import annotations

from tmd.core.job import Job
from tmd.core.journal import Journal
from tmd.core.processes import Agent, Process
from tmd.core.records import JobRecord, LedgerSnapshot
from tmd.core.settings import CoreSettings
from tmd.core.under_way import Flight, Recovery


def restore_job(record: JobRecord, snapshot: LedgerSnapshot, settings: CoreSettings, journal: Journal) -> Job:
    """Roles, agents and fences from the records. What only lived in memory is found out again from the ranks' reports."""
    job = Job(record, settings, journal)
    job.nodes = {node.node: node for node in snapshot.nodes if node.job_id == job.job_id}
    job.migrations = {m.migration_id: m for m in snapshot.migrations if m.job_id == job.job_id}
    for rank in sorted((r for r in snapshot.ranks if r.job_id == job.job_id), key=lambda r: _number(r.incarnation)):
        first_rank = rank.rank if rank.state in ("starting", "member", "leaver", "exited") else None
        job.processes[rank.incarnation] = Process(rank, first_rank)
    _restore_agents(job)
    _restore_roles(job)
    for node, known in job.nodes.items():
        if known.use == "released":
            job.leaving_nodes[node] = known.reason
    job.left_before = {node for node, known in job.nodes.items() if known.use in ("released", "lost")}
    for migration in job.open_migrations():
        if not migration.joiners and len(migration.to_nodes) == 1:
            job.wanted_node[migration.migration_id] = migration.to_nodes[0]
    return job


def begin(job: Job, now: float) -> None:
    """The first moment of this life of the daemon: from here on deadlines count."""
    if job.over:
        return
    patience_s = max(job.settings.agent_grace_s, job.settings.heartbeat_timeout_s)
    job.settling_until_s = now + patience_s
    job.wake_at(now)  # the first event may be about something else
    job.finishing_since_s = now
    for agent in job.agents.values():
        agent.gone_s = now
    for process in job.processes.values():
        process.heard_s = now
    flying = job.flying()
    if flying is not None:
        flipped_s = now if flying.state == "copying" else None
        job.flight = Flight(now, flipped_s=flipped_s, withdrawn=flying.reason)
    if job.record.state == "recovering":
        job.recovery = Recovery(since_s=now, sign="a recovery was under way when the daemon restarted", sign_s=now, cause=0)
        for migration in job.open_migrations():
            if migration.kind == "unplanned":
                job.recovery.lost.update(migration.leavers)
        for rank in job.vacant():
            job.recovery.lost.setdefault(rank, _last_holder(job, rank))


def _restore_agents(job: Job) -> None:
    for node in job.nodes.values():
        if node.agent_id:
            agent = job.agents[node.agent_id] = Agent(node.agent_id, node.node, dict(node.labels))
            agent.released = node.use == "released"
            if node.use == "lost":
                agent.fenced = f"node {node.node} was given up ({node.reason}); start tmd-run again to bring it back"


def _restore_roles(job: Job) -> None:
    """Who holds which role: from the rank records before the first epoch, later from the table, plus joiners of a recovery."""
    plan = job.record.plan
    planned = plan.successor.members if plan is not None else {}
    for process in job.processes.values():
        record = process.record
        if record.rank is None:
            continue
        if record.state == "joiner" and record.rank in planned and planned[record.rank].incarnation == process.incarnation:
            continue
        left_behind = plan is not None and plan.leavers.get(record.rank) == process.incarnation and job.record.state == "running"
        if record.state in ("starting", "member", "leaver", "joiner") or (record.state == "lost" and left_behind):
            job.give_role(record.rank, process)
        elif record.state == "exited":
            job.left.add(record.rank)
            if record.rank not in job.roles:
                job.give_role(record.rank, process)
        elif record.state == "lost" and job.record.state == "finishing" and record.rank not in job.roles:
            job.give_role(record.rank, process)
            job.lost_at_end[record.rank] = f"rank {record.rank} on {process.node} was lost after the last step ({record.reason})"


def _last_holder(job: Job, rank: int) -> str:
    """The incarnation that held a vacant role when the epoch ran."""
    table = job.record.table
    assert table is not None, "a job that recovers has a table"
    return table.members[rank].incarnation


def _number(incarnation: str) -> int:
    """The counter in an incarnation's name, so that ten comes after nine."""
    return int(incarnation.rpartition(".")[2])
