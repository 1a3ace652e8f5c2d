"""Nodes from the pool: a job that asked for standbys and has none left takes one for ranks that must move or have no holder, and
another one for what was used, and gives back what it does not need after all. One that is about to end takes none.

Contract: one node at a time, by one order to one of the job's agents; a node has come once the resource manager lists it. Nothing
is remembered over a restart of the daemon: what the job holds says the resource manager, what is under way say the agents."""

from __future__ import annotations

from tmd.core import errands, holding, requests, time_left, words
from tmd.core.job import Job
from tmd.core.pool import Pool

#: Launches of a node's agent that fail in a row until the node counts as one that will not serve.
HOPELESS_FAILURES = 2


def advance(job: Job, now: float) -> None:
    """Takes the growth under way one step further, or begins one. `job.growth_sentence` says what the pool does for the job."""
    _keep_what_came_again(job, now)
    word = job.pool.word if job.pool is not None else None
    allocation = job.allocation
    if word is None or allocation is None or allocation.state != "running" or job.settings.observe_only:
        job.growth_sentence = ""
        return
    _note_origin(job, now, word)
    _look_after(job, now)
    going = _ranks_to_go(job, now)
    wanted = _wanted(job, now, word, going)
    if wanted and not job.growth.order_id and (going or not _gives_back(job)):
        _reach(job, now, word)
    elif not wanted:
        _return_spares(job, now, word, going)
    job.growth_sentence = _sentence(job, now, word) if wanted or job.growth.order_id else ""


# -------------------------------------------------------------------- what is under way


def _look_after(job: Job, now: float) -> None:
    """The order that is outstanding, of this life of the daemon or of an earlier one, and what has become of nodes that came."""
    errand = job.growth
    if not errand.order_id:
        _take_up(job, now)
    if not errand.order_id:
        _give_up_silent(job, now)
    elif job.holds(errand.nodes[0]):
        errands.forget(job, errand)
        job.grown_s[errand.nodes[0]] = now
    else:
        errands.look(job, now, errand)


def _take_up(job: Job, now: float) -> None:
    for kind in ("expand", "companion"):
        for node in job.pool.word.nodes if job.pool is not None and job.pool.word is not None else ():
            if errands.take_up(job, now, job.growth, kind, node):
                return


def _keep_what_came_again(job: Job, now: float) -> None:
    """What an earlier life of the daemon gave back and then took again, and the job holds now, must not be given back for the
    first reason. Looked at once, when what the job holds is known: later on a node that comes again is seen to come."""
    if job.allocation is None or not job.allocation.live:
        return
    for node in sorted(job.left_before):
        if job.holds(node) and _was_taken_again(job, node):
            holding.come_again(job, now, node)
    job.left_before.clear()


def _was_taken_again(job: Job, node: str) -> bool:
    """By the word of an agent that is at it, or that has done it since the node was given back."""
    given_back_s = job.nodes[node].updated_s
    return any(
        order.kind in ("expand", "companion") and node in order.nodes
        for agent in job.agents.values()
        for order in agent.orders.values()
        if order.state == "running" or (order.state == "done" and order.since_s > given_back_s)
    )


def _give_up_silent(job: Job, now: float) -> None:
    """Nodes that have come, but whose agents have not: those of companion jobs start one by themselves, once."""
    for node in job.allocation.companions if job.allocation is not None else ():
        record = job.nodes[node]
        if job.agent_on(node) is None and not record.agent_id and record.use != "released":
            job.grown_s.setdefault(node, now)
    for node, since_s in list(job.grown_s.items()):
        agent = job.agent_on(node)
        if agent is not None and agent.reported:
            job.growth.failures, job.growth.failure = 0, ""
            del job.grown_s[node]
        elif not job.holds(node):
            del job.grown_s[node]
            if not job.nodes[node].agent_id:
                errands.fail(
                    job, now, job.growth, f"{node} had come and was gone again before its agent spoke: see the job's output"
                )
        elif job.is_companion(node):
            due_s = since_s + job.settings.order_timeout_s
            if now >= due_s:
                del job.grown_s[node]
                job.give_back(now, node, f"its agent has not come in {job.settings.order_timeout_s:g} s", job.last_about(node))
                errands.fail(job, now, job.growth, f"the agent of {node} has not come")
            else:
                job.wake_at(due_s)


def _note_origin(job: Job, now: float, word: Pool) -> None:
    """On record, for people and for the day the job ends: which nodes are the pool's."""
    for node in _held(job, word):
        companion = job.companion_of(node)
        how = f"companion job {companion}" if companion else "expansion"
        origin = f"reservation {word.name}, by {how}"
        if job.nodes[node].origin != origin:
            job.set_node(now, node, origin=origin)
            job.tell(now, node, "taken", f"{node} is the job's, from {origin}")


# -------------------------------------------------------------------- what is needed


def _ranks_to_go(job: Job, now: float) -> set[int]:
    """Ranks that need a standby and are not promised to one: their node is to be left, or they have no holder."""
    if job.record.state not in ("running", "recovering"):
        return set()
    ranks = {rank for node in requests.nodes_to_empty(job, now) for rank in job.ranks_on(node)}
    ranks |= set(job.vacant())
    ranks |= {rank for migration in job.open_migrations() if migration.kind == "planned" for rank in migration.leavers}
    return ranks - {rank for migration in job.open_migrations() if migration.joiners for rank in migration.leavers}


def _wanted(job: Job, now: float, word: Pool, going: set[int]) -> bool:
    """One more node is needed."""
    allocation = job.allocation
    assert allocation is not None
    if job.record.state not in ("running", "recovering") or not allocation.standby:
        return False
    spares = _spares(job)
    if going:
        usable = len(requests.usable(job, now))
        coming = job.record.nproc_per_node * len([node for node in spares if job.agent_on(node) is None])
        return usable + coming < len(going)
    return job.record.state == "running" and not job.open_migrations() and len(spares) < _kept(job, word)


def _kept(job: Job, word: Pool) -> int:
    """Standby nodes that the job is to have while nothing happens: what it asked for to be there from its start."""
    allocation = job.allocation
    assert allocation is not None
    return allocation.standby if word.refill and not allocation.pooled else 0


def _spares(job: Job) -> list[str]:
    """The job's nodes that stand by, or soon will."""
    return [node for node in job.allocation.nodes if _is_spare(job, node)] if job.allocation is not None else []


def _is_spare(job: Job, node: str) -> bool:
    hopeless = node in job.launches and job.launches[node].failures >= HOPELESS_FAILURES
    going = job.node_state(node) in ("draining", "drained", "down")
    return job.nodes[node].use == "standby" and not going and not hopeless and not job.ranks_on(node)


def _held(job: Job, word: Pool) -> list[str]:
    """Nodes of the pool that the job holds."""
    nodes = job.allocation.nodes if job.allocation is not None else ()
    return [node for node in nodes if node in job.nodes and (node in word.nodes or job.is_companion(node))]


# -------------------------------------------------------------------- taking and returning


def _gives_back(job: Job) -> bool:
    """Nodes are on their way out of the job. Whoever waits for them comes first, if there is no hurry."""
    leaving = any(job.holds(node) and not job.is_companion(node) for node in job.leaving_nodes)
    return leaving and not job.shrink.failures


def _reach(job: Job, now: float, word: Pool) -> None:
    """Gives the order for one node, unless something is in the way, which the sentence says."""
    free = job.pool.free(job) if job.pool is not None else []
    if _obstacle(job, now, word) or not free:
        return
    if job.shrink.order_id:
        return  # one change of the job's size at a time: each names all nodes that are to be left
    errand = job.growth
    node = free[errand.failures % len(free)]
    errand.reservation = word.name
    errands.begin(job, now, errand, word.way, (node,))


def _obstacle(job: Job, now: float, word: Pool) -> str:
    """Why no node can come from the pool, whether it has any or not."""
    allocation = job.allocation
    assert allocation is not None
    late = time_left.too_late(job, now)
    if late:
        return late
    if word.problem:
        return word.problem
    if word.users and allocation.user and allocation.user not in word.users:
        return f"reservation {word.name} is not for {allocation.user}, only for {', '.join(word.users)}"
    held = len(_held(job, word))
    if held >= word.nodes_per_job:
        return f"the job holds {words.count(held, 'node')} of reservation {word.name}, and a job may hold {word.nodes_per_job}"
    return ""


def _return_spares(job: Job, now: float, word: Pool, going: set[int]) -> None:
    """What was taken and is not needed after all goes back, once that has been so for a while."""
    superfluous = len(_spares(job)) - _kept(job, word)
    mine = [node for node in _held(job, word) if _is_spare(job, node)]
    busy = going or job.open_migrations() or job.record.state != "running" or job.growth.order_id
    if busy or superfluous <= 0 or not mine:
        job.superfluous_since_s = None
        return
    if job.superfluous_since_s is None:
        job.superfluous_since_s = now
    due_s = job.superfluous_since_s + job.settings.heartbeat_timeout_s
    if now < due_s:
        job.wake_at(due_s)
        return
    for node in mine[:superfluous]:
        job.grown_s.pop(node, None)
        job.give_back(now, node, "the job does not need it any more", job.last_about(node))


# -------------------------------------------------------------------- for people


def _sentence(job: Job, now: float, word: Pool) -> str:
    """What the pool does for the job, or why it does nothing."""
    errand = job.growth
    failed = f" after {words.count(errand.failures, 'failed attempt')} ({errand.failure})" if errand.failures else ""
    if errand.order_id:
        way = "expansion" if errand.kind == "expand" else "a companion job"
        return f"{errand.nodes[0]} is being taken from reservation {word.name} by {way}{failed}"
    obstacle = _obstacle(job, now, word)
    if obstacle:
        return f"nothing comes from the pool: {obstacle}"
    if job.pool is None or not job.pool.free(job):
        return f"nothing comes from the pool: reservation {word.name} has no free node ({len(word.nodes)} in all){failed}"
    if now < errand.retry_at_s:
        return f"a node of reservation {word.name} is taken shortly{failed}"
    if job.shrink.order_id or _gives_back(job):
        return f"a node of reservation {word.name} is taken as soon as another one is given back"
    return f"no agent of the job can take a node of reservation {word.name} now: a newer tmd-run, or one outside a container, can"
