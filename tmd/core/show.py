"""Views of a job for API and tmctl: the records, with what is known live."""

from __future__ import annotations

from tmd.core import launching, releasing, standby, words
from tmd.core.job import Job
from tmd.core.processes import Process
from tmd.core.views import JobView, MigrationView, NodeView, RankView


def job(job: Job) -> JobView:
    """With everything that belongs to it."""
    last = job.commits.last()
    return JobView(
        record=job.record,
        ranks=tuple(_rank(job, process) for process in job.holders().values()),
        standbys=tuple(standbys(job)),
        nodes=tuple(job.nodes.values()),
        migrations=tuple(view for view in migrations(job) if view.record.ended_s is None),
        next_step=job.next_step(),
        normal_step_s=job.commits.normal_step_s(),
        last_commit_s=last.time_s if last is not None else None,
        sentence=job.sentence,
    )


def standbys(job: Job) -> list[RankView]:
    """Those without a role, and joiners that are being prepared."""
    roles = set(job.roles.values())
    return [
        _rank(job, process)
        for process in job.active()
        if process.record.state in ("standby", "joiner") and process.incarnation not in roles and not job.over
    ]


def migrations(job: Job) -> list[MigrationView]:
    return [
        MigrationView(record=migration, sentence=_migration_sentence(job, migration.migration_id))
        for migration in job.migrations.values()
    ]


def nodes(job: Job) -> list[NodeView]:
    """Every node that the job has ever used."""
    views = []
    for node, record in job.nodes.items():
        agent = job.agents.get(record.agent_id)
        pool = [process for process in job.active() if process.node == node and process.record.state == "standby"]
        views.append(
            NodeView(
                record=record,
                state=record.state,
                connected=agent is not None and agent.connected,
                last_heard_s=agent.heard_s if agent is not None else 0.0,
                ranks=tuple(job.ranks_on(node)),
                standbys_ready=sum(process.report.phase == "ready" for process in pool),
                standbys=len(pool),
                sentence=_node_sentence(job, node),
            )
        )
    return views


def sentences(job: Job) -> dict[str, str]:
    told = {job.job_id: job.sentence}
    told |= {view.record.migration_id: view.sentence for view in migrations(job)}
    told |= {view.record.node: view.sentence for view in nodes(job)}
    told |= {view.record.incarnation: view.sentence for view in standbys(job)}
    return told


def _rank(job: Job, process: Process) -> RankView:
    report, agent = process.report, job.agents.get(process.record.agent_id)
    return RankView(
        record=process.record,
        phase=report.phase if report.version >= 0 else "",
        process=process.status.state if process.status is not None else "",
        exit_code=process.exit_code,
        pid=process.status.pid if process.status is not None else 0,
        host=report.host,
        port=report.port,
        connected=agent is not None and agent.connected,
        last_heard_s=process.heard_s,
        run_epoch=report.run_epoch,
        live_epoch=report.live_epoch,
        next_step=process.step_shown,
        counters=report.counters,
        sentence=_rank_sentence(job, process),
    )


def _rank_sentence(job: Job, process: Process) -> str:
    agent = job.agents.get(process.record.agent_id)
    if agent is None or not agent.connected:
        return f"the agent of {process.node} is not connected"
    if process.record.state == "standby":
        return standby.obstacle(job, process, agent.heard_s) or "ready"
    if process.record.reason:
        return process.record.reason
    return process.report.phase if process.report.version >= 0 else "its process is being started"


def _migration_sentence(job: Job, migration_id: str) -> str:
    migration = job.migrations[migration_id]
    if migration.ended_s is not None:
        return migration.reason
    if migration.kind == "unplanned":
        return job.sentence
    return job.migration_sentences.get(migration_id, migration.state)


def _node_sentence(job: Job, node: str) -> str:
    record = job.nodes[node]
    agent = job.agents.get(record.agent_id)
    told = launching.sentence(job, node) or releasing.sentence(job, node)
    if told and not job.over:
        return told
    if record.use in ("released", "lost"):
        return f"{record.use}: {record.reason}" if record.reason else record.use
    if agent is None or not agent.connected:
        return "its agent is not connected"
    if node in job.node_sentences:
        return f"{job.node_sentences[node]}{f'; {job.growth_sentence}' if job.growth_sentence else ''}"
    if record.use == "standby" and record.state in ("draining", "drained"):
        return f"its standbys are not used: {node} is {record.state}"
    ranks = job.ranks_on(node)
    origin = f"; from {record.origin}" if record.origin else ""
    if ranks:
        return f"trains {words.ranks(ranks)}{origin}"
    processes = [process for process in job.processes.values() if process.record.agent_id == record.agent_id]
    if processes and not any(process.active for process in processes):
        return f"its standbys have ended: {processes[-1].record.reason}"
    return f"holds standbys{origin}"
