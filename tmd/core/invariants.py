"""What must hold between any two events. Asserted by tests and by the simulator, never by the daemon itself."""

from __future__ import annotations

from tmd.core.job import Job
from tmd.core.processes import ACTIVE_STATES


def check(job: Job) -> None:
    """Raises AssertionError naming what does not hold."""
    _check_epochs(job)
    _check_roles(job)
    _check_plan(job)
    _check_migrations(job)
    _check_directives(job)
    _check_errands(job)
    if job.attempt is not None:
        _check_attempt(job)


def _check_epochs(job: Job) -> None:
    record = job.record
    assert record.epoch <= record.epoch_limit, f"epoch {record.epoch} was never given out (limit {record.epoch_limit})"
    assert record.poison_epoch <= record.epoch_limit, f"poison {record.poison_epoch} beyond the limit {record.epoch_limit}"
    if record.resolution is not None:
        assert record.resolution.epoch <= record.poison_epoch, "a resolution of an epoch that is not called off"
    if record.state == "running":
        assert record.epoch > record.poison_epoch, f"running in epoch {record.epoch}, called off up to {record.poison_epoch}"
        assert record.table is not None, "running without a table"
        assert record.table.epoch == record.epoch, f"running in epoch {record.epoch} with the table of {record.table.epoch}"
    if record.state == "recovering":
        assert record.poison_epoch >= record.epoch, "recovering from an epoch that is not called off"
        assert (job.recovery is not None) or job.settling_until_s is not None, "recovering, and nothing is known of it"
    if job.over:
        assert record.exit_code is not None, "over without an exit code"
        assert record.reason, "over without a reason"


def _check_roles(job: Job) -> None:
    record = job.record
    assert len(set(job.roles.values())) == len(job.roles), f"one incarnation has two roles: {job.roles}"
    for rank, incarnation in job.roles.items():
        process = job.processes[incarnation]
        assert process.record.rank == rank, f"{incarnation} holds rank {rank}, its record says {process.record.rank}"
        if record.state in ("running", "recovering", "installing", "restarting"):
            serves = process.active or job.has_flipped_away(process)
            assert serves, f"rank {rank} is held by {incarnation}, which is {process.record.state}"
    if record.state == "running":
        assert record.table is not None
        table = {rank: member.incarnation for rank, member in record.table.members.items()}
        assert job.roles == table, f"roles {job.roles} differ from the running table {table}"
    if job.over:
        return
    plan = record.plan
    joiners = {plan.successor.members[rank].incarnation for rank in plan.leavers} if plan is not None else set()
    for process in job.active():
        if process.record.rank is not None and process.incarnation not in joiners:
            holder = job.roles.get(process.record.rank)
            assert holder == process.incarnation or record.state == "finishing", (
                f"{process.incarnation} is an active {process.record.state} of rank {process.record.rank}, held by {holder}"
            )


def _check_plan(job: Job) -> None:
    record, plan = job.record, job.record.plan
    if plan is None:
        assert not record.armed, "armed without a plan"
        assert job.flight is None, "a flight without a plan"
        return
    assert plan.base_epoch == record.epoch, f"plan of epoch {plan.base_epoch} in epoch {record.epoch}"
    assert plan.base_epoch < plan.successor.epoch <= record.epoch_limit, "the plan's epoch is not reserved"
    assert record.table is not None, "a plan without a table"
    for rank, leaver in plan.leavers.items():
        assert record.table.members[rank].incarnation == leaver, f"leaver {leaver} is not rank {rank} of the table"
    changed = {rank for rank, member in plan.successor.members.items() if record.table.members[rank] != member}
    assert changed == set(plan.leavers), f"the plan changes ranks {changed}, its leavers are {set(plan.leavers)}"


def _check_attempt(job: Job) -> None:
    attempt, record = job.attempt, job.record
    assert attempt is not None
    table = attempt.install.membership
    assert table.epoch == record.epoch_limit > record.poison_epoch, "an attempt under an epoch that is called off"
    members = {rank: member.incarnation for rank, member in table.members.items()}
    assert members == job.roles, f"the attempt's table {members} differs from the roles {job.roles}"
    if not attempt.install.fresh:
        assert job.resolved(), "an epoch is installed before the last one was resolved"
        resolved_step = record.resolution.target_step if record.resolution is not None else None
        assert attempt.install.target_step == resolved_step, "the attempt's first step is not the resolved one"


def _check_migrations(job: Job) -> None:
    open_migrations = job.open_migrations()
    if job.over:
        assert not open_migrations, f"the job is over, {[m.migration_id for m in open_migrations]} are open"
    under_way = [m for m in open_migrations if m.kind == "planned" and m.state in ("preparing", "installing", "armed", "copying")]
    expected = [job.record.plan.migration_id] if job.record.plan is not None else []
    assert [m.migration_id for m in under_way] == expected, f"migrations {under_way} under way, the plan is of {expected}"
    for migration in job.migrations.values():
        ended = migration.state in ("done", "aborted", "failed")
        assert ended == (migration.ended_s is not None), f"{migration.migration_id} is {migration.state} without having ended"
        assert not ended or migration.reason, f"{migration.migration_id} ended without a reason"


def _check_directives(job: Job) -> None:
    """Nobody who is fenced is named to an agent, once everything has been said."""
    if job.stale:
        return
    for agent in job.agents.values():
        if agent.sent is None or agent.fenced or not agent.connected:
            continue
        for spec in agent.sent.processes:
            process = job.processes[spec.incarnation]
            allowed = process.record.state in (*ACTIVE_STATES, "exited") or process.leaving
            assert allowed, f"{spec.incarnation} is {process.record.state} and is still named to {agent.agent_id}"


def _check_errands(job: Job) -> None:
    """Nobody is told to start what is there, nor to give back what is used or cannot be given back."""
    if job.over or job.stale:
        return
    growth = job.growth
    if growth.order_id:
        assert growth.kind in ("expand", "companion"), f"the growth is a {growth.kind}"
        assert len(growth.nodes) == 1, f"the growth is by {growth.nodes}"
        exclusive = not (growth.kind == "expand" and job.shrink.order_id)
        assert exclusive, "the allocation is made larger and smaller at once"
    for node, errand in job.launches.items():
        if errand.order_id:
            assert errand.nodes == (node,), f"the launch for {node} is an order for {errand.nodes}"
            assert job.agent_on(node) is None, f"an agent is to be started on {node}, which has one"
            assert job.holds(node), f"an agent is to be started on {node}, which is not the job's"
    if job.shrink.order_id:
        allocation = job.allocation
        assert allocation is not None, "nodes are given back of an allocation that is not known"
        for node in job.shrink.nodes:
            assert node != allocation.batch_host, f"the batch host {node} is to be given back"
            assert job.agent_on(node) is None, f"{node} is to be given back, and an agent serves there"
            assert not job.ranks_on(node), f"{node} is to be given back, and ranks {job.ranks_on(node)} live there"
