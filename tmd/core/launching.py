"""Every node that the job holds has an agent: where one is missing, an agent of the job is told to start it. So a standby node
gets its first agent and a node whose agent was lost another one; what fails is tried again. A companion job starts its own."""

from __future__ import annotations

from tmd.core import errands
from tmd.core.job import Job
from tmd.core.under_way import Errand

GOING_STATES = ("draining", "drained", "down")


def advance(job: Job, now: float) -> None:
    """Takes every launch as far as it can go now."""
    allocation = job.allocation
    if allocation is None or allocation.state != "running" or job.record.state == "finishing" or job.settings.observe_only:
        return
    if allocation.preempted_s is not None:
        return  # Slurm has told what ran to end
    for node in allocation.nodes:
        if _needs_agent(job, node):
            _look_after(job, now, node)


def tidy(job: Job, now: float) -> None:
    """Nobody is told any more to start an agent that has come, or that is not needed. Done whatever else waits."""
    for node, errand in list(job.launches.items()):
        agent = job.agent_on(node)
        if agent is not None:
            _served(job, now, node, errand, agent.connected_s if agent.connected else now)
        elif errand.order_id and not _needs_agent(job, node):
            errands.withdraw(job, now, errand)
        if not job.holds(node):
            del job.launches[node]


def _needs_agent(job: Job, node: str) -> bool:
    if not job.holds(node) or job.agent_on(node) is not None or job.is_companion(node):
        return False
    return job.nodes[node].use != "released" and job.node_state(node) not in GOING_STATES


def _look_after(job: Job, now: float, node: str) -> None:
    errand = job.launches.get(node)
    if errand is None:
        errand = job.launches[node] = Errand(retry_at_s=now + _first_pause_s(job, node))
    if errand.order_id:
        errands.look(job, now, errand)
        return
    own_until_s = job.record.created_s + job.settings.order_timeout_s
    if job.record.state == "forming" and job.vacant() and now < own_until_s:
        job.wake_at(own_until_s)  # its position is waited for
        return
    if not _taken_up(job, now, node, errand):
        errands.begin(job, now, errand, "launch", (node,))


def _first_pause_s(job: Job, node: str) -> float:
    """A node whose agent was lost rests: if it is broken, the resource manager may have noticed by then."""
    return 2 * job.settings.heartbeat_timeout_s if job.nodes[node].agent_id else 0.0


def _served(job: Job, now: float, node: str, errand: Errand, since_s: float) -> None:
    """The node has an agent. Once that has served for a while, earlier failures are forgotten."""
    if errand.order_id:
        errands.forget(job, errand)
    errand.retry_at_s = now + _first_pause_s(job, node)
    if now - since_s >= job.settings.order_timeout_s:
        errand.failures, errand.failure = 0, ""


def _taken_up(job: Job, now: float, node: str, errand: Errand) -> bool:
    if not errands.take_up(job, now, errand, "launch", node):
        return False
    errands.look(job, now, errand)
    return True


def sentence(job: Job, node: str) -> str:
    """What is done about a node that has no agent; empty: nothing."""
    errand = job.launches.get(node)
    if errand is None or not job.holds(node) or job.agent_on(node) is not None:
        return ""
    failed = f" after {errand.failures} failed {'attempt' if errand.failures == 1 else 'attempts'} ({errand.failure})"
    failed = failed if errand.failures else ""
    starter = job.agents.get(errand.agent_id) if errand.order_id else None
    if starter is not None:
        return f"its agent is being started from {starter.node}{failed}"
    return f"it has no agent; one is started shortly{failed}"
