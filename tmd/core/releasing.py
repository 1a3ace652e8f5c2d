"""Giving nodes back. Two ways: the resource manager takes a node when it is told to (local nodes), or agents of the job make the
job's allocation smaller (Slurm); then a node is given back once the job does not list it any more. What cannot be given back
before the job's end stays, and people are told what still runs there."""

from __future__ import annotations

from tmd.core import errands
from tmd.core.instructions import ReleaseNode
from tmd.core.job import Job

#: From the end of an agent's connection to that of its process, on a busy machine.
EXIT_S = 0.5


def vacate(job: Job, now: float, node: str, reason: str, cause: int) -> None:
    """The ranks have left this node: it is given back, or stays as a standby node if it has to stay."""
    obstacle = _obstacle(job, node)
    if not obstacle:
        job.give_back(now, node, reason, cause)
        return
    job.set_node(now, node, use="standby", reason=job.nodes[node].reason)
    job.tell(now, node, "stays", f"{node} has no rank any more and stays in the job: {obstacle}", cause)


def advance(job: Job, now: float) -> None:
    """Gives drained nodes back that hold no rank, and has the allocation made smaller by what was given back."""
    if not job.agents_hold_nodes or job.over or job.settings.observe_only:
        return
    if job.allocation is None or job.allocation.state != "running":
        return
    _give_back_drained(job, now)
    nodes = _due(job, now)
    errand = job.shrink
    if errand.order_id and not set(errand.nodes) & set(nodes):
        errands.forget(job, errand)
        errand.failures = 0
    if errand.order_id:
        errands.look(job, now, errand)
    elif nodes and not (job.growth.order_id and job.growth.kind == "expand"):
        errands.begin(job, now, errand, "release", nodes)


def _give_back_drained(job: Job, now: float) -> None:
    """Somebody wants the node, and it holds nothing but standbys, or nothing at all."""
    for node, record in list(job.nodes.items()):
        drained = record.state in ("draining", "drained") and record.use in ("standby", "lost") and job.holds(node)
        if drained and not _is_needed(job, node) and not _obstacle(job, node):
            job.give_back(now, node, f"it is {record.state}{f': {record.reason}' if record.reason else ''}", job.last_about(node))


def _is_needed(job: Job, node: str) -> bool:
    """A role lives there, or is about to."""
    return any(process.node == node and process.record.state != "standby" for process in job.active())


def _due(job: Job, now: float) -> list[str]:
    """The nodes of the allocation that were given back and on which nothing of the job is left."""
    allocation = job.allocation
    assert allocation is not None
    for node in [node for node in job.leaving_nodes if node not in allocation.nodes]:
        del job.leaving_nodes[node]
    return [
        node
        for node in job.leaving_nodes
        if node != allocation.batch_host and not job.is_companion(node) and _is_empty(job, now, node)
    ]


def _is_empty(job: Job, now: float, node: str) -> bool:
    """Its agent has left, or has had time to: one that Slurm kills makes the srun of the job's script fail."""
    record = job.nodes[node]
    agent = job.agents.get(record.agent_id)
    if agent is None:
        return True
    leave_until_s = record.updated_s + job.settings.heartbeat_timeout_s if agent.connected else agent.gone_s + EXIT_S
    if now < leave_until_s:
        job.wake_at(leave_until_s)
        return False
    return not agent.connected or not _runs(job, record.agent_id)


def _runs(job: Job, agent_id: str) -> bool:
    return any(
        process.record.agent_id == agent_id and process.status is not None and not process.exited
        for process in job.processes.values()
    )


def by_manager(job: Job) -> list[ReleaseNode]:
    """Nodes that were given back and on which nothing of the job runs any more, for the resource manager to take."""
    if job.agents_hold_nodes and (job.over or job.allocation is None or job.allocation.live):
        if job.over:
            job.leaving_nodes.clear()  # what the job held ends with it
        return _companions(job)
    released = []
    for node, reason in list(job.leaving_nodes.items()):
        agent_id = job.nodes[node].agent_id
        agent = job.agents.get(agent_id)
        if agent is None or not agent.connected or not _runs(job, agent_id):
            del job.leaving_nodes[node]
            released.append(ReleaseNode(job.job_id, node, reason))
    return released


def _companions(job: Job) -> list[ReleaseNode]:
    """Nodes of companion jobs that were given back: those jobs end with their agents, and are ended where that is not enough."""
    released = []
    for node, reason in job.leaving_nodes.items():
        companion = job.companion_of(node)
        agent = job.agents.get(job.nodes[node].agent_id)
        if companion and companion not in job.ended_companions and (agent is None or not agent.connected):
            job.ended_companions.add(companion)
            released.append(ReleaseNode(companion, node, reason))
    return released


# -------------------------------------------------------------------- what cannot be given back


def _obstacle(job: Job, node: str) -> str:
    """Why the node stays until the job's end; empty: it need not."""
    if not job.agents_hold_nodes:
        return ""
    allocation = job.allocation
    if allocation is None:
        return "the resource manager has not said yet what the job holds"
    if job.is_companion(node):
        return ""
    if node == allocation.batch_host:
        return "the batch script runs there, and Slurm takes the batch host back only with the job"
    agent = job.agent_on(node)
    own = [other for other in job.agents.values() if other.serves and not other.launched]
    if agent is not None and own == [agent]:
        return "its tmd-run is the last that the job's own srun has started: with it that srun, and so the script, would end"
    return ""


def sentence(job: Job, node: str) -> str:
    """What an operator must know of a node that is given back, or that cannot be; empty: nothing."""
    record = job.nodes[node]
    if node in job.leaving_nodes and job.shrink.failures:
        return f"not given back yet: {job.shrink.failure}; it is tried again"
    if node in job.leaving_nodes and job.holds(node):
        return f"being given back: {record.reason}"
    empty = record.use == "standby" and not _is_needed(job, node) and not job.ranks_on(node)
    obstacle = _obstacle(job, node) if empty and record.state in ("draining", "drained") and job.holds(node) else ""
    if not obstacle:
        return ""
    return (
        f"no rank is left here ({record.state}); it stays until the job ends: {obstacle}. Safe: work that leaves its processes "
        "alone. Not safe: reboot, power off, state=down: they end the job's script"
    )
