"""The start of a job: nodes get their ranks as they arrive, and epoch 0 is installed fresh. Also the start from nothing, when
a rank is lost before there is anything that could be recovered."""

from __future__ import annotations

from tmd.core import installing, words
from tmd.core.ending import EXIT_GIVEN_UP, fail_job
from tmd.core.job import Job
from tmd.core.processes import Agent

#: A fresh epoch that could not be installed this often will not be.
FRESH_ATTEMPTS = 10


def place(job: Job, now: float, agent: Agent, node_index: int | None) -> str | None:
    """Gives a new agent the ranks of its position, if it has one. Returns why it cannot have it, or None.

    Without an index the first free position is taken, in order of arrival; nobody is placed once all are taken.
    """
    if job.record.state != "forming" or (node_index is not None and node_index >= job.record.nnodes):
        return None
    vacant = _vacant_positions(job)
    if node_index is not None and node_index not in vacant:
        first = node_index * job.record.nproc_per_node
        holder = job.holder(first)
        return f"position {node_index} is already taken by {holder.node}" if holder is not None else None
    if vacant:
        _take_position(job, now, agent, vacant[0] if node_index is None else node_index)
    return None


def advance(job: Job, now: float) -> str:
    """Waits for all nodes and listeners, then installs the first epoch and starts the job."""
    if job.attempt is not None and not job.vacant():
        if installing.is_linked(job):
            installing.go(job, now)
            return "running"
        waiting = installing.check(job, now)
        if waiting is not None:
            return waiting
    if job.failed_attempts >= FRESH_ATTEMPTS:
        fail_job(job, now, 1, f"the first epoch could not be installed in {FRESH_ATTEMPTS} attempts; see the job's story")
        return job.record.reason
    _fill_vacancies(job, now)
    if job.over:
        return job.record.reason
    missing = job.vacant()
    if not missing:
        job.vacant_since_s = None
    else:
        if any(_was_started(job, position) for position in _vacant_positions(job)) and job.is_vacant_too_long(now):
            fail_job(job, now, EXIT_GIVEN_UP, f"no node for rank {missing[0]} came in {job.settings.hold_limit_s:g} s")
            return job.record.reason
        nodes = len({rank // job.record.nproc_per_node for rank in missing})
        return f"waiting for {nodes} more node{'s' if nodes > 1 else ''} ({job.record.nnodes} train)"
    silent = [rank for rank, process in job.holders().items() if not process.report.port]
    if silent:
        return _wait_for_listeners(job, now, silent)
    early = installing.wait_to_retry(job, now)
    if early is not None:
        return early
    installing.start(job, now, fresh=True, target_step=0, joining={})
    return f"installing epoch {job.record.epoch_limit}"


def restart(job: Job, now: float, reason: str) -> None:
    """Every rank starts again from nothing, as a new incarnation."""
    if job.record.restarts >= job.settings.restart_limit:
        fail_job(job, now, 1, f"{reason}; the job has already started {job.record.restarts + 1} times, which is the limit")
        return
    event = job.tell(now, job.job_id, "restart", f"the job starts again from nothing: {reason}")
    for migration in job.open_migrations():
        job.end_migration(now, migration.migration_id, "aborted", f"the job starts again from nothing: {reason}", event)
    for process in job.active():
        if process.record.state != "standby":
            job.set_process(now, process, state="retired", reason="the job starts again from nothing")
    places = {rank: (process.record.agent_id, process.record.local_rank) for rank, process in job.holders().items()}
    for rank in list(job.roles):
        job.vacate(rank)
    job.attempt = job.recovery = job.flight = None
    job.failed_attempts, job.retry_at_s = 0, 0.0
    job.forget_progress()
    job.evolve(
        now,
        state="restarting",
        restarts=job.record.restarts + 1,
        poison_epoch=job.record.epoch_limit,
        resolution=None,
        table=None,
        plan=None,
        armed=False,
    )
    for rank, (agent_id, slot) in places.items():
        agent = job.agents[agent_id]
        if _can_host(job, agent):
            job.mint(now, agent, slot, rank)


def _vacant_positions(job: Job) -> list[int]:
    nproc = job.record.nproc_per_node
    return sorted({rank // nproc for rank in job.vacant()})


def _take_position(job: Job, now: float, agent: Agent, position: int) -> None:
    """This node takes the vacant ranks of a position; its standbys make room."""
    for process in job.active():
        if process.record.agent_id == agent.agent_id and process.record.state == "standby":
            job.set_process(now, process, state="retired", reason=f"makes room for the ranks of position {position}")
    ranks = []
    for rank in _vacant_ranks(job, position):
        free = job.free_slots(agent)
        if free:
            slot = rank % job.record.nproc_per_node
            job.mint(now, agent, slot if slot in free else free[0], rank)
            ranks.append(rank)
    job.set_node(now, agent.node, use="training")
    job.tell(now, agent.node, "placed", f"{agent.node} takes {words.ranks(ranks)}")


def _fill_vacancies(job: Job, now: float) -> None:
    """A rank that was lost before the start is started again on its node, or on a node that has no ranks."""
    for position in _vacant_positions(job):
        agent = _home(job, position) or _spare(job)
        if agent is None or not _was_started(job, position):
            continue
        job.refills[position] = job.refills.get(position, 0) + 1
        if job.refills[position] > job.settings.restart_limit:
            lost = _vacant_ranks(job, position)[0]
            fail_job(job, now, 1, f"rank {lost} was lost {job.refills[position]} times before the job had started; see its log")
            return
        _take_position(job, now, agent, position)


def _vacant_ranks(job: Job, position: int) -> list[int]:
    return [rank for rank in job.vacant() if rank // job.record.nproc_per_node == position]


def _was_started(job: Job, position: int) -> bool:
    """Its node had come; one that has not is waited for."""
    return any(
        process.record.rank is not None and process.record.rank // job.record.nproc_per_node == position
        for process in job.processes.values()
    )


def _home(job: Job, position: int) -> Agent | None:
    """The agent that held ranks of this position last and holds none of another."""
    nproc = job.record.nproc_per_node
    elsewhere = {process.record.agent_id for rank, process in job.holders().items() if rank // nproc != position}
    for process in reversed(job.processes.values()):
        agent = job.agents.get(process.record.agent_id)
        if process.record.rank is None or process.record.rank // nproc != position or agent is None:
            continue
        if agent.agent_id not in elsewhere and _can_host(job, agent):
            return agent
    return None


def _spare(job: Job) -> Agent | None:
    """An agent whose node has no ranks."""
    taken = {process.record.agent_id for process in job.holders().values()}
    return next((agent for agent in job.agents.values() if agent.agent_id not in taken and _can_host(job, agent)), None)


def _can_host(job: Job, agent: Agent) -> bool:
    return agent.serves and agent.connected and job.node_state(agent.node) not in ("draining", "drained", "down")


def _wait_for_listeners(job: Job, now: float, silent: list[int]) -> str:
    first = min(job.holders()[rank].record.updated_s for rank in silent)
    deadline = first + job.settings.build_timeout_s
    job.wake_at(deadline)
    if now >= deadline:
        fail_job(job, now, 1, f"rank {silent[0]} has not opened its listener for {job.settings.build_timeout_s:g} s; see its log")
        return job.record.reason
    return f"waiting for {words.ranks(silent)} to open {'its listener' if len(silent) == 1 else 'their listeners'}"
