"""Takes in what an agent says: newer words replace older ones, fenced incarnations are not listened to."""

from __future__ import annotations

import msgspec

from tmd.core import errands
from tmd.core.job import Job
from tmd.core.losses import lose_agent
from tmd.core.processes import Agent, Process
from tmd.protocol.agent import AgentHello, AgentStatus, ProcessStatus


def take_status(job: Job, now: float, agent: Agent, status: AgentStatus) -> bool:
    """False if it is older than what is known."""
    if status.version < agent.version or (status.version == agent.version and agent.reported):
        return False
    agent.version = status.version
    agent.heard_s = now
    agent.reported = True
    agent.orders = {order.order_id: order for order in status.orders}
    errands.note_ended(job, now, agent)
    named = set()
    for word in status.processes:
        named.add(word.incarnation)
        process = job.processes.get(word.incarnation)
        if process is not None and process.record.agent_id == agent.agent_id:
            _take_process(job, now, process, word)
    for process in job.processes.values():
        known = process.status
        if process.record.agent_id == agent.agent_id and process.incarnation not in named and known is not None:
            _take_process(job, now, process, msgspec.structs.replace(known, state="exited"))
    return True


def _take_process(job: Job, now: float, process: Process, word: ProcessStatus) -> None:
    job.stale = job.stale or (word.state == "exited" and process.leaving)
    process.status = word
    report = word.rank
    if not process.active or report is None or report.incarnation != process.incarnation:
        return
    if report.version > process.report.version:
        process.report = report
        process.heard_s = now
        if process.record.rank is not None and job.commits.take(process):
            job.progress_s = now


def supersede(job: Job, now: float, hello: AgentHello) -> None:
    """A node has come back as another agent: the one before is over, and so are its ranks."""
    other = job.agent_on(hello.node)
    if other is not None and other.agent_id != hello.agent_id:
        lose_agent(job, now, other, f"its node came back as {hello.agent_id}")
