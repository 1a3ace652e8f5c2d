"""What every process and every agent is to do, built from the job's state alone: sent again whenever it differs from what was
sent last, so that a restarted daemon which says the same things changes nothing."""

from __future__ import annotations

import msgspec

from tmd.core import errands
from tmd.core.job import Job
from tmd.core.processes import Agent, Process
from tmd.protocol.agent import AgentDirective, JobOver, ProcessSpec
from tmd.protocol.membership import Member
from tmd.protocol.rank import Directive


class Sequence:
    """Numbers what this life of the daemon sends."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


def for_agents(job: Job, now: float, sequence: Sequence) -> list[tuple[str, AgentDirective]]:
    """The directives that have changed, by agent; and those that an agent which spoke just now may have missed."""
    changed = _changed(job, sequence) if job.stale else []
    for agent_id, _ in changed:
        job.agents[agent_id].sent_s = now
    for agent in job.agents.values():
        if agent.sent is not None and agent.heard_s == now and now - agent.sent_s >= job.settings.heartbeat_s:
            agent.sent_s = now
            changed.append((agent.agent_id, agent.sent))
    return changed


def _changed(job: Job, sequence: Sequence) -> list[tuple[str, AgentDirective]]:
    job.stale = False
    wanted: dict[str, list[Process]] = {}
    for process in job.processes.values():
        if not job.over and _is_wanted(process):
            wanted.setdefault(process.record.agent_id, []).append(process)
    changed = []
    for agent in job.agents.values():
        if agent.fenced or not agent.connected:
            continue
        directive = _for_agent(job, agent, wanted.get(agent.agent_id, []), sequence)
        if directive is not agent.sent:
            agent.sent = directive
            changed.append((agent.agent_id, directive))
    return changed


def _for_agent(job: Job, agent: Agent, named: list[Process], sequence: Sequence) -> AgentDirective:
    """The agent's whole directive; the very one sent last if nothing in it has changed."""
    directive = AgentDirective(
        generation=sequence.generation,
        sequence=agent.sent.sequence if agent.sent is not None else 0,
        processes=tuple(
            ProcessSpec(
                incarnation=process.incarnation,
                local_rank=process.record.local_rank,
                rank=process.first_rank,
                world_size=job.record.world_size,
            )
            for process in named
        ),
        ranks=tuple(_for_process(job, process, sequence) for process in named if not process.exited),
        job_over=_job_over(job, agent, named),
        orders=errands.orders_for(job, agent),
        withdrawn=tuple(job.withdrawn.get(agent.agent_id, ())),
    )
    if directive == agent.sent:
        return agent.sent
    return msgspec.structs.replace(directive, sequence=sequence.next())


def _is_wanted(process: Process) -> bool:
    """A retired process is named until it has left of its own accord, or its time to do so is up."""
    if process.record.state == "retired":
        return process.leaving
    return process.active or process.record.state == "exited"


def _job_over(job: Job, agent: Agent, named: list[Process]) -> JobOver | None:
    if job.over:
        return JobOver(exit_code=job.record.exit_code or 0, reason=job.record.reason)
    if agent.released and not named:
        return JobOver(
            exit_code=0, reason=f"node {agent.node} has been given back: {job.nodes[agent.node].reason}", node_only=True
        )
    return None


def _for_process(job: Job, process: Process, sequence: Sequence) -> Directive:
    """The process's whole directive; the very one sent last if nothing in it has changed."""
    record = job.record
    plays = process.record.state in ("starting", "member", "leaver", "joiner")
    plan = record.plan if plays and _offers_plan(job, process) else None
    directive = Directive(
        job_id=record.job_id,
        incarnation=process.incarnation,
        generation=sequence.generation,
        sequence=process.directive.sequence if process.directive is not None else 0,
        world_size=record.world_size,
        nproc_per_node=record.nproc_per_node,
        rank=process.record.rank,
        poison_epoch=record.poison_epoch,
        resolution=record.resolution,
        install=job.attempt.install if job.attempt is not None and plays else None,
        live_epoch=record.epoch if plays and not job.called_off else -1,
        plan=plan,
        armed=record.armed and plan is not None,
        retired=process.record.state == "retired",
        rehearse_from=_rehearse_from(job) if process.record.state == "standby" else None,
    )
    if directive != process.directive:
        process.directive = msgspec.structs.replace(directive, sequence=sequence.next())
    assert process.directive is not None
    return process.directive


def _offers_plan(job: Job, process: Process) -> bool:
    """A plan that is being called off is kept from the leavers alone, until one of them has given its word: should it flip all
    the same, everybody else is ready for it."""
    withdrawn = job.flight is not None and job.flight.withdrawn
    return not job.called_off and not (withdrawn and process.record.state == "leaver")


def _rehearse_from(job: Job) -> Member | None:
    """Who gives standbys the answers of the build: the member of the representative role, as which they are warmed up. If that
    one is lost, any other: best one that was warmed up itself, because it has those very answers."""
    table = job.record.table
    if table is None or job.fresh:
        return None
    last = job.record.world_size - 1
    if job.roles.get(last) == table.members[last].incarnation:
        return table.members[last]
    living = [rank for rank, member in table.members.items() if job.roles.get(rank) == member.incarnation]
    best = min(living, key=lambda rank: (job.processes[job.roles[rank]].first_rank is not None, -rank), default=None)
    return table.members[best] if best is not None else None
