"""Standbys: which can take a role, which is the best for it, and which must be started so that there is one."""

from __future__ import annotations

from collections.abc import Iterable

from tmd.core.job import Job
from tmd.core.processes import Agent, Process


def obstacle(job: Job, process: Process, now: float) -> str | None:
    """Why this standby cannot take a role now, or None."""
    agent = job.agents.get(process.record.agent_id)
    if agent is None or not agent.serves or not agent.connected:
        return f"the agent of {process.node} is not connected"
    if now - agent.heard_s > job.settings.heartbeat_timeout_s:
        return f"the agent of {process.node} has been silent for {now - agent.heard_s:.0f} s"
    state = job.node_state(process.node)
    if state in ("draining", "drained", "down"):
        return f"{process.node} is {state}"
    if job.has_lost(process.node):
        return f"{process.node} is no longer part of the job's allocation"
    if process.dying:
        return "its process is ending"
    if process.touched:
        return "it holds the state of a role"
    if process.report.phase != "ready":
        return f"it is still {process.report.phase}"
    return None


def ready(job: Job, now: float) -> list[Process]:
    """Standbys that can take a role now."""
    return [process for process in job.active() if process.record.state == "standby" and obstacle(job, process, now) is None]


def warming(job: Job, now: float) -> list[Process]:
    """Standbys that will be ready once they are warm."""
    return [
        process
        for process in job.active()
        if process.record.state == "standby"
        and process.report.phase in ("starting", "building", "warming")
        and (obstacle(job, process, now) or "").startswith("it is still")
    ]


def choose(job: Job, leaving: dict[int, str], candidates: Iterable[Process]) -> dict[int, Process]:
    """Rank -> the standby that is to take it, for as many of the ranks `leaving` (rank -> node it leaves) as there are
    candidates. Whole nodes go to whole nodes where that is possible, and a role stays off the nodes of its buddy and its ward,
    because losing a rank with its buddy loses the record of its small state."""
    free: dict[str, list[Process]] = {}
    for process in candidates:
        free.setdefault(process.node, []).append(process)
    groups: dict[str, list[int]] = {}
    for rank, node in sorted(leaving.items()):
        groups.setdefault(node, []).append(rank)
    chosen: dict[int, Process] = {}
    for ranks in sorted(groups.values(), key=len, reverse=True):
        waiting = list(ranks)
        while waiting and any(free.values()):
            node = min((node for node in free if free[node]), key=lambda node: _unfitness(job, node, waiting, leaving, free))
            free[node].sort(key=lambda process: process.record.local_rank)
            while waiting and free[node]:
                chosen[waiting.pop(0)] = free[node].pop(0)
    return chosen


def _unfitness(
    job: Job, node: str, ranks: list[int], leaving: dict[int, str], free: dict[str, list[Process]]
) -> tuple[bool, bool, int, bool, int, str]:
    """Sorts nodes for a group of ranks, best first."""
    here = {rank for rank in job.ranks_on(node) if rank not in leaving}
    near = any(job.buddy(rank) in here or job.ward(rank) in here for rank in ranks)
    room = len(free[node])
    return (room < len(ranks), near, -min(room, len(ranks)), bool(here), room, node)


def keep_warm(job: Job, now: float) -> None:
    """Starts standby processes where they are missing: on every node that holds no member, and, if no other standby is left,
    in the free slots of the nodes that do."""
    if job.record.state == "finishing" or (job.fresh and job.vacant()):
        return
    pool = bool(ready(job, now) or warming(job, now))
    training = {process.record.agent_id for process in job.holders().values()}
    for agent in job.agents.values():
        occupied = agent.agent_id in training
        if not _can_start(job, agent):
            continue
        if occupied and (pool or job.fresh or job.settings.observe_only):
            continue
        for slot in job.free_slots(agent):
            if agent.stillborn.get(slot, 0) <= job.settings.restart_limit:
                process = job.mint(now, agent, slot, None)
                job.tell(now, process.incarnation, "started", f"standby {process.incarnation} starts on {agent.node}")
                pool = True
        if not occupied and job.nodes[agent.node].use == "training":
            job.set_node(now, agent.node, use="standby")


def _can_start(job: Job, agent: Agent) -> bool:
    stays = job.node_state(agent.node) not in ("draining", "drained", "down") and not job.has_lost(agent.node)
    return agent.serves and agent.connected and stays
