"""Errands: what agents of a job do for it with the resource manager's commands, as the job's user. Contract: one attempt at a
time, each an order to one agent; an attempt that fails, or comes to no end in order_timeout_s, is told and followed by another
after a pause that grows. Nothing is remembered over a restart of the daemon: what an agent is at it says itself."""

from __future__ import annotations

from collections.abc import Collection

from tmd.core.job import Job
from tmd.core.processes import Agent
from tmd.core.under_way import Errand
from tmd.protocol.agent import NodeOrder, OrderKind, OrderStatus


def begin(job: Job, now: float, errand: Errand, kind: OrderKind, nodes: Collection[str]) -> bool:
    """Gives the next order, unless it is too early or no agent can carry it out. True if one is outstanding now."""
    if now < errand.retry_at_s:
        job.wake_at(errand.retry_at_s)
        return False
    able = _able(job, now, kind, nodes)
    if not able:
        return False
    agent = able[errand.failures % len(able)]
    event = job.tell(now, " ".join(nodes), kind, f"{agent.node} is to {_words(kind, nodes)}")
    errand.order_id, errand.agent_id, errand.since_s = f"o{event}", agent.agent_id, now
    errand.kind, errand.nodes = kind, tuple(nodes)
    job.stale = True
    return True


def _able(job: Job, now: float, kind: OrderKind, nodes: Collection[str]) -> list[Agent]:
    """Agents that can do something about these nodes, best first: on a node that stays, then one of the job's own step."""
    batch_host = job.allocation.batch_host if job.allocation is not None else ""
    able = [
        agent
        for agent in job.agents.values()
        if agent.serves and agent.launches and agent.connected and agent.reported and agent.node not in nodes
        if now - agent.heard_s < job.settings.heartbeat_timeout_s and (agent.grows or kind in ("launch", "release"))
    ]
    return sorted(able, key=lambda agent: (agent.node != batch_host, _leaves(job, agent.node), agent.launched, agent.node))


def _leaves(job: Job, node: str) -> bool:
    return job.node_state(node) in ("draining", "drained", "down")


def _words(kind: OrderKind, nodes: Collection[str]) -> str:
    named = ", ".join(nodes)
    return {
        "launch": f"start an agent on {named}",
        "release": f"give {named} back",
        "expand": f"take {named} from the pool into the job",
        "companion": f"take {named} from the pool by a companion job",
    }[kind]


def look(job: Job, now: float, errand: Errand) -> None:
    """Ends the attempt under way if it has failed, if its agent is gone, or if it has taken too long."""
    timeout_s = job.settings.order_timeout_s
    agent = job.agents.get(errand.agent_id)
    word = agent.orders.get(errand.order_id) if agent is not None else None
    if agent is None or not agent.serves or not agent.connected:
        lost_s = agent.gone_s + job.settings.agent_grace_s if agent is not None and agent.serves else now
        if now >= lost_s:
            fail(job, now, errand, f"the agent that was to do it has left{f' {agent.node}' if agent is not None else ''}")
        else:
            job.wake_at(lost_s)
    elif word is not None and word.state == "failed":
        fail(job, now, errand, word.reason or "no reason given")
    elif now >= errand.since_s + timeout_s:
        fail(job, now, errand, f"nothing has come of it in {timeout_s:g} s")
    else:
        job.wake_at(errand.since_s + timeout_s)


def fail(job: Job, now: float, errand: Errand, reason: str) -> None:
    """The attempt is over; the next one comes after a pause."""
    withdraw(job, now, errand)
    errand.failures += 1
    errand.failure = reason
    pause_s = min(job.settings.order_timeout_s, job.settings.agent_grace_s * 2.0 ** min(errand.failures - 1, 10))
    errand.retry_at_s = now + pause_s
    job.wake_at(errand.retry_at_s)
    text = f"attempt {errand.failures}: {reason}; trying again in {pause_s:g} s"
    job.tell(now, " ".join(errand.nodes), "errand_failed", text)


def withdraw(job: Job, now: float, errand: Errand) -> None:
    """Nobody waits for the outstanding order any more: its agent ends what it still does for it."""
    agent = job.agents.get(errand.agent_id)
    if errand.order_id and agent is not None and agent.serves:
        job.withdrawn.setdefault(errand.agent_id, {})[errand.order_id] = now
    forget(job, errand)


def forget(job: Job, errand: Errand) -> None:
    """There is no outstanding order; what was done for it stays."""
    errand.order_id = errand.agent_id = ""
    job.stale = True


def find(job: Job, kind: OrderKind, node: str) -> tuple[Agent, OrderStatus] | None:
    """An agent that is at it, by its own word: for an earlier life of the daemon, perhaps."""
    for agent in job.agents.values():
        ended = job.withdrawn.get(agent.agent_id, {})
        for word in agent.orders.values() if agent.serves and agent.connected else ():
            if word.kind == kind and word.state == "running" and node in word.nodes and word.order_id not in ended:
                return agent, word
    return None


def take_up(job: Job, now: float, errand: Errand, kind: OrderKind, node: str) -> bool:
    """If that is under way since before this daemon, it is this errand's order from now on, waited for like any other."""
    found = find(job, kind, node)
    if found is None:
        return False
    agent, word = found
    errand.order_id, errand.agent_id, errand.nodes, errand.kind = word.order_id, agent.agent_id, (node,), kind
    errand.since_s = min(word.since_s, now)
    job.stale = True
    return True


def note_ended(job: Job, now: float, agent: Agent) -> None:
    """Withdrawn orders of which the agent says that they have ended, or of which it has never heard, are named no more."""
    withdrawn = job.withdrawn.get(agent.agent_id, {})
    for order_id, since_s in list(withdrawn.items()):
        word = agent.orders.get(order_id)
        over = word.state != "running" if word is not None else now - since_s >= job.settings.order_timeout_s
        if over:
            del withdrawn[order_id]
            job.stale = True


def orders_for(job: Job, agent: Agent) -> tuple[NodeOrder, ...]:
    """What this agent is to do."""
    given = [errand for errand in (*job.launches.values(), job.shrink, job.growth) if errand.agent_id == agent.agent_id]
    return tuple(
        NodeOrder(order_id=errand.order_id, kind=errand.kind, nodes=errand.nodes, reservation=errand.reservation)
        for errand in given
    )
