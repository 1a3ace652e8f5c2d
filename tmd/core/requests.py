"""What is to be moved: operators' requests and drained nodes become planned migrations, one of which is under way at a time.
Refusals say what, why and what to do instead."""

from __future__ import annotations

import dataclasses

from tmd.core import planned, proposing, standby, time_left, words
from tmd.core.job import Job
from tmd.core.processes import Process
from tmd.core.records import MigrationRecord

DRAINED_STATES = ("draining", "drained")


class Refused(ValueError):
    """An operator's request that cannot be granted; the text says what, why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A request that can be granted."""

    #: Rank -> the incarnation that leaves.
    leavers: dict[int, str]
    from_nodes: tuple[str, ...]
    to_node: str | None


# -------------------------------------------------------------------- operators


def check(job: Job, now: float, *, node: str | None, rank: int | None, to_node: str | None) -> Move:
    """Raises Refused unless these ranks can be moved, now or after what is under way."""
    if (node is None) == (rank is None):
        raise Refused("name either a node or a rank to move, not both and not neither")
    _check_job(job)
    late = time_left.too_late(job, now)
    if late:
        raise Refused(f"it is too late to move ranks of job {job.job_id}: {late}")
    ranks = _ranks_of_node(job, node) if node is not None else [_existing_rank(job, rank)]
    for number in ranks:
        _check_rank(job, number)
    leavers = {number: job.roles[number] for number in ranks}
    from_nodes = tuple(sorted({job.processes[incarnation].node for incarnation in leavers.values()}))
    if to_node is not None:
        _check_target(job, to_node, from_nodes)
    move = Move(leavers, from_nodes, to_node)
    _check_standbys(job, now, move)
    return move


def _check_job(job: Job) -> None:
    state = job.record.state
    if job.over:
        raise Refused(f"job {job.job_id} has ended ({state}: {job.record.reason}): there is nothing left to move")
    if state == "finishing":
        raise Refused(f"job {job.job_id} is finishing, every step is committed: there is nothing left to move")
    if job.fresh:
        raise Refused(f"job {job.job_id} has not started yet ({job.sentence or state}): try again once it runs")
    if job.settings.observe_only:
        raise Refused("tmd only observes (observe_only is set): it moves nothing; change the setting and restart the daemon")


def _ranks_of_node(job: Job, node: str) -> list[int]:
    if node not in job.nodes:
        raise Refused(f"job {job.job_id} has no node {node}; it has {', '.join(sorted(job.nodes)) or 'none'}")
    ranks = job.ranks_on(node)
    if not ranks:
        raise Refused(f"no rank of job {job.job_id} lives on {node} (it is {job.nodes[node].use}): there is nothing to move")
    return ranks


def _existing_rank(job: Job, rank: int | None) -> int:
    if rank is None or rank not in job.ranks:
        raise Refused(f"job {job.job_id} has no rank {rank}; its ranks are 0 to {job.record.world_size - 1}")
    return rank


def _check_rank(job: Job, rank: int) -> None:
    for migration in job.open_migrations():
        if rank in migration.leavers:
            raise Refused(
                f"rank {rank} is already moving in migration {migration.migration_id} ({migration.state}): "
                f"wait for it, or abort it first"
            )
    if rank not in job.roles:
        raise Refused(f"rank {rank} was lost and is being replaced right now: wait for that to end")


def _check_target(job: Job, to_node: str, from_nodes: tuple[str, ...]) -> None:
    if to_node in from_nodes:
        raise Refused(f"{to_node} is where the rank is now: name another node")
    if to_node not in job.nodes:
        raise Refused(f"job {job.job_id} has no node {to_node}; it has {', '.join(sorted(job.nodes))}")
    if job.agent_on(to_node) is None:
        raise Refused(f"{to_node} is no longer part of job {job.job_id} ({job.nodes[to_node].use}): start tmd-run there again")
    if job.node_state(to_node) in (*DRAINED_STATES, "down"):
        raise Refused(f"{to_node} is {job.node_state(to_node)}: resume it first, or name another node")
    if not any(process.node == to_node and process.record.state == "standby" for process in job.active()):
        raise Refused(f"{to_node} has no standby of job {job.job_id}: name a standby node")


def _check_standbys(job: Job, now: float, move: Move) -> None:
    others = [process for process in usable(job, now) if process.node not in move.from_nodes]
    here = [process for process in others if move.to_node in (None, process.node)]
    promised = _promised(job)
    free = max(0, min(len(here), len(others) - len(promised)))
    if free < len(move.leavers):
        where = f" on {move.to_node}" if move.to_node is not None else ""
        taken = f" that is not promised to {', '.join(sorted(set(promised)))}" if promised else ""
        raise Refused(
            f"{words.count(len(move.leavers), 'standby')}{where} needed, {free} usable{taken}: "
            f"start tmd-run of job {job.job_id} on another node, or resume one that is drained"
        )


def usable(job: Job, now: float) -> list[Process]:
    """Standbys that can take a role now or once they are warm."""
    return [*standby.ready(job, now), *standby.warming(job, now)]


def _promised(job: Job) -> list[str]:
    """The migrations that have still to choose their standbys, each as often as it needs one."""
    waiting = [migration for migration in job.open_migrations() if migration.kind == "planned" and not migration.joiners]
    return [migration.migration_id for migration in waiting for _ in migration.leavers]


def explain(job: Job, now: float, move: Move, *, paused: bool) -> str:
    """What would happen, in words."""
    leaving = {rank: job.processes[incarnation].node for rank, incarnation in move.leavers.items()}
    candidates = [
        process
        for process in standby.ready(job, now)
        if process.node not in move.from_nodes and move.to_node in (None, process.node)
    ]
    chosen = standby.choose(job, leaving, candidates)
    lines = []
    for rank, node in leaving.items():
        if rank in chosen:
            lines.append(f"rank {rank} would move from {node} to {chosen[rank].node} ({chosen[rank].incarnation}, ready)")
        else:
            lines.append(f"rank {rank} would move from {node} to the next standby that is warm")
    before = [migration.migration_id for migration in job.open_migrations()]
    if paused:
        lines.append("not before tmd is resumed: it is paused")
    elif before:
        lines.append(f"not before {', '.join(before)} has ended")
    return "; ".join(lines)


def create(
    job: Job, now: float, move: Move, trigger: str, *, attempt: int = 1, started_s: float | None = None, cause: int | None = None
) -> str:
    """Queues the migration and returns its id."""
    migration_id = f"m{job.journal.next_event_id()}"
    whom = f"{words.ranks(sorted(move.leavers))} {'is' if len(move.leavers) == 1 else 'are'}"
    job.tell(now, migration_id, "requested", f"{whom} to leave {', '.join(move.from_nodes)}: {trigger}", cause)
    if move.to_node is not None:
        job.wanted_node[migration_id] = move.to_node
    job.add_migration(
        MigrationRecord(
            migration_id=migration_id,
            job_id=job.job_id,
            kind="planned",
            state="queued",
            leavers=move.leavers,
            from_nodes=move.from_nodes,
            to_nodes=(move.to_node,) if move.to_node is not None else (),
            trigger=trigger,
            started_s=now if started_s is None else started_s,
            attempt=attempt,
        )
    )
    return migration_id


def abort(job: Job, now: float, migration: MigrationRecord, reason: str) -> None:
    """Raises Refused if it is over, unplanned, or past the flip."""
    migration_id = migration.migration_id
    if migration.ended_s is not None:
        raise Refused(f"migration {migration_id} has ended already ({migration.state}: {migration.reason})")
    if migration.kind == "unplanned":
        raise Refused(f"migration {migration_id} replaces ranks that are lost: there is nothing to go back to")
    if job.flight is not None and job.flight.flipped_s is not None and job.flying() == migration:
        raise Refused(f"migration {migration_id} has flipped: it is too late to call it off")
    for node in migration.from_nodes:
        if migration.trigger.startswith(_drain_of(node)):
            job.drains_held.add(node)
    call_off(job, now, migration, reason)


def call_off(job: Job, now: float, migration: MigrationRecord, reason: str) -> None:
    """Ends a planned migration that has not flipped, at once if nothing is under way."""
    if job.flying() == migration and job.record.plan is not None:
        planned.withdraw(job, now, reason)
    else:
        job.end_migration(now, migration.migration_id, "aborted", reason)


# -------------------------------------------------------------------- drained nodes


def _drain_of(node: str) -> str:
    return f"drain of {node}:"


def consider_drains(job: Job, now: float) -> None:
    """Every node with members that is to be left gets a migration; one whose drain was taken back loses it."""
    for node, record in list(job.nodes.items()):
        why = _why_leave(job, now, node)
        if why is None:
            _drain_taken_back(job, now, node)
            continue
        if record.use == "training" and job.agent_on(node) is not None:
            sentence = _empty_node(job, now, node, why)
            if sentence:
                job.node_sentences[node] = f"{record.state}: {sentence}"
            else:
                job.node_sentences.pop(node, None)


def _why_leave(job: Job, now: float, node: str) -> str | None:
    """Why ranks are to leave this node while they can, or None. Of a node that is down, or was cut out of the job, and whose
    agent goes on speaking, the resource manager knows something that its processes do not feel yet."""
    record = job.nodes[node]
    if record.state in DRAINED_STATES:
        return record.reason or "no reason given"
    if record.use != "training":
        return None
    if job.has_lost(node):
        return "it is no longer part of the job's allocation, though its agent speaks"
    if record.state == "down":
        believed_s = job.drained_since_s.get(node, now) + job.settings.heartbeat_timeout_s
        job.wake_at(max(believed_s, now + job.settings.heartbeat_s))
        return f"it is down, though its agent speaks: {record.reason or 'no reason given'}" if now >= believed_s else None
    return None


def nodes_to_empty(job: Job, now: float) -> list[str]:
    """Nodes whose ranks are to leave as soon as there are standbys for them."""
    return [
        node
        for node, record in job.nodes.items()
        if record.use == "training" and node not in job.drains_held and _why_leave(job, now, node) is not None
        if job.drain_attempts.get(node, 0) < job.settings.migration_attempts and job.agent_on(node) is not None
    ]


def _drain_taken_back(job: Job, now: float, node: str) -> None:
    job.drains_held.discard(node)
    job.drain_attempts.pop(node, None)
    job.node_sentences.pop(node, None)
    for migration in job.open_migrations():
        if migration.trigger.startswith(_drain_of(node)) and not (job.flight is not None and job.flight.flipped_s is not None):
            call_off(job, now, migration, f"{node} is {job.node_state(node)} again")


def _empty_node(job: Job, now: float, node: str, why: str) -> str:
    """Starts a migration of all ranks on this node that are not moving yet; says what stands in its way."""
    moving = {rank for migration in job.open_migrations() for rank in migration.leavers}
    ranks = [rank for rank in job.ranks_on(node) if rank not in moving]
    if not ranks or job.record.state != "running":
        return ""
    trigger = f"{_drain_of(node)} {why}"
    late = time_left.too_late(job, now)
    if late:
        job.say_once(
            now, node, f"late {node}", f"{trigger}: {words.ranks(ranks)} {'stays' if len(ranks) == 1 else 'stay'}: {late}"
        )
        return f"its ranks stay: {late}"
    tried = job.drain_attempts.get(node, 0)
    if job.settings.observe_only:
        job.say_once(now, node, trigger, f"{trigger}: tmd only observes, it would move {words.ranks(ranks)}")
        return "tmd only observes, so its ranks stay"
    if node in job.drains_held:
        return "an operator called its migration off, so its ranks stay; tmctl migrate moves them"
    if tried >= job.settings.migration_attempts:
        return f"{tried} attempts to move its ranks failed; tmctl migrate tries again"
    free = len([process for process in usable(job, now) if process.node != node]) - len(_promised(job))
    if free < len(ranks):
        held = f"{words.count(len(ranks), 'rank')} {'stays' if len(ranks) == 1 else 'stay'}"
        return f"its {held} until there are as many standbys ({max(0, free)} usable)"
    job.drain_attempts[node] = tried + 1
    started_s = job.drained_since_s.get(node, now) if tried == 0 else now
    move = Move({rank: job.roles[rank] for rank in ranks}, (node,), None)
    create(job, now, move, trigger, attempt=tried + 1, started_s=started_s, cause=job.last_about(node))
    return ""


# -------------------------------------------------------------------- the queue


def advance(job: Job, now: float, *, paused: bool) -> None:
    """Takes the migration under way, or the first that waits, one step further; gives each a sentence."""
    consider_drains(job, now)
    if job.record.plan is not None:
        migration = job.flying()
        assert migration is not None, "a plan belongs to a migration"
        sentence = planned.watch(job, now)
        job.migration_sentences[migration.migration_id] = sentence
    first: str | None = job.record.plan.migration_id if job.record.plan is not None else None
    for migration in list(job.open_migrations()):
        if migration.kind == "unplanned" or job.flying() == migration:
            continue
        sentence = _advance_waiting(job, now, migration, first, paused=paused)
        job.migration_sentences[migration.migration_id] = sentence
        first = first or migration.migration_id


def _advance_waiting(job: Job, now: float, migration: MigrationRecord, first: str | None, *, paused: bool) -> str:
    moved = [rank for rank, incarnation in migration.leavers.items() if job.roles.get(rank) != incarnation]
    if moved:
        reason = f"{words.ranks(moved)} {'was' if len(moved) == 1 else 'were'} replaced meanwhile"
        job.end_migration(now, migration.migration_id, "aborted", reason)
        return reason
    if first is not None:
        return f"queued behind {first}"
    if paused:
        return "queued: tmd is paused"
    late = time_left.too_late(job, now)
    if late:
        job.end_migration(now, migration.migration_id, "aborted", late)
        return late
    epoch = job.record.epoch
    slow = [p for p in job.holders().values() if p.report.phase != "running" or p.report.live_epoch < epoch]
    if slow:
        return f"waiting for {job.name(slow[0])}, which is {slow[0].report.phase}"
    return proposing.propose(job, now, migration)


def advance_queue_while_recovering(job: Job) -> None:
    """Nothing planned moves during a recovery; what waits says so."""
    for migration in job.open_migrations():
        if migration.kind == "planned":
            job.migration_sentences[migration.migration_id] = "waiting for the recovery of the job"
        else:
            job.migration_sentences[migration.migration_id] = job.sentence
