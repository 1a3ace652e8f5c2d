"""One of every record, every field set, for tests that write and read them."""

from __future__ import annotations

from typing import Any

from tmd.core.instructions import Persist
from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord
from tmd.protocol.handoff import HandoffReport, HandoffSource
from tmd.protocol.membership import Member, Membership, Plan, Resolution


def table(epoch: int) -> Membership:
    members = {rank: Member(incarnation=f"i{rank}", node="n1", host="127.0.0.11", port=4000 + rank) for rank in (0, 1)}
    return Membership(epoch=epoch, members=members)


def job(job_id: str = "j1", **changes: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "job_id": job_id,
        "state": "running",
        "nnodes": 2,
        "nproc_per_node": 1,
        "world_size": 2,
        "owner_uid": 1000,
        "job_key": bytes(range(32)),
        "epoch": 3,
        "epoch_limit": 5,
        "poison_epoch": 2,
        "table": table(3),
        "resolution": Resolution(epoch=2, target_step=7),
        "armed": True,
        "plan_counter": 1,
        "incarnation_counter": 9,
        "restarts": 1,
        "versions": {"torch": "2.13"},
        "script_digest": "abc",
        "command": ("train.py", "--lr", "0.1"),
        "approximations": ("rank 1 and its buddy were lost together",),
        "reason": "all is well",
        "exit_code": None,
        "steps": 700,
        "created_s": 1.25,
        "updated_s": 2.5,
    }
    return JobRecord(**{**fields, **changes})


def planned_job() -> JobRecord:
    plan = Plan(plan_id=1, migration_id="m1", base_epoch=3, leavers={1: "i1"}, successor=table(4))
    return job("j2", plan=plan, table=None, resolution=None, exit_code=-9, created_s=1.5)


def rank(**changes: Any) -> RankRecord:
    fields: dict[str, Any] = {
        "job_id": "j1",
        "incarnation": "i1",
        "node": "n1",
        "agent_id": "a1",
        "local_rank": 0,
        "rank": 1,
        "state": "member",
        "reason": "first start",
        "updated_s": 3.5,
    }
    return RankRecord(**{**fields, **changes})


def node(**changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "node": "n1",
        "job_id": "j1",
        "state": "draining",
        "use": "training",
        "labels": {"rack": "r1"},
        "agent_id": "a1",
        "reason": "bad DIMM",
        "updated_s": 4.5,
    }
    return NodeRecord(**{**fields, **changes})


def migration(**changes: Any) -> MigrationRecord:
    fields: dict[str, Any] = {
        "migration_id": "m1",
        "job_id": "j1",
        "kind": "planned",
        "state": "preparing",
        "leavers": {1: "i1"},
        "joiners": {1: "i7"},
        "from_nodes": ("n1",),
        "to_nodes": ("n3",),
        "plan_id": 1,
        "trigger": "operator root",
        "reason": "on its way",
        "phases_s": {"detect": 0.0, "select": 0.125},
        "downtime_s": 0.05,
        "downtime_steps": 1.5,
        "lost_time_s": 0.25,
        "normal_step_s": 0.0125,
        "steps_redone": 2,
        "stayer_links_reopened": 3,
        "bytes_moved": 1 << 40,
        "record_origin": "exact",
        "handoffs": {
            1: HandoffReport(
                transport="tcp",
                why="rdma cannot be used here",
                source="rank 1 on n1",
                bytes_by_transport={"tcp": 5},
                parts_s={"bytes": 0.5},
                sources=(HandoffSource(rank=1, node="n1", transport="tcp", size_bytes=5),),
            )
        },
        "started_s": 5.5,
        "ended_s": 6.5,
        "attempt": 2,
    }
    return MigrationRecord(**{**fields, **changes})


def event(event_id: int, *, cause: int = 0, subject: str = "m1", job_id: str = "j1", kind: str = "phase") -> EventRecord:
    return EventRecord(
        event_id=event_id, cause=cause, time_s=7.5 + event_id, job_id=job_id, subject=subject, kind=kind, text=f"line {event_id}"
    )


def everything() -> Persist:
    return Persist(
        jobs=(job(), planned_job()),
        ranks=(rank(), rank(incarnation="i2", rank=None, state="standby")),
        nodes=(node(), node(node="n2", state="up", labels={})),
        migrations=(migration(), migration(migration_id="m2", downtime_s=None, downtime_steps=None, ended_s=None, joiners={})),
        events=(event(1), event(2, cause=1)),
        paused=True,
    )


def whole_job(job_id: str, *, first_event: int, ended_s: float | None = None, **changes: Any) -> Persist:
    """What a daemon leaves of a job of two ranks, one of which has moved: sound in itself. Four events from `first_event` on."""
    places = [(0, "member"), (1, "retired"), (1, "member"), (None, "standby")]
    ranks = tuple(
        rank(job_id=job_id, incarnation=f"{job_id}.{number}", rank=role, state=state)
        for number, (role, state) in enumerate(places)
    )
    holders = {0: f"{job_id}.0", 1: f"{job_id}.2"}
    members = {role: Member(incarnation=name, node="n1", host="127.0.0.11", port=4000) for role, name in holders.items()}
    over = {"state": "done", "exit_code": 0, "updated_s": ended_s} if ended_s is not None else {}
    moved = {"leavers": {1: f"{job_id}.1"}, "joiners": {1: f"{job_id}.2"}, "state": "done", "ended_s": 6.5}
    at_s = ended_s or 0.0
    told = tuple(
        EventRecord(
            event_id=first_event + number,
            cause=first_event + number - 1 if number else 0,
            time_s=at_s + 0.001 * number,
            job_id=job_id,
            subject=job_id,
            kind="phase",
            text=f"line {number}",
        )
        for number in range(4)
    )
    fields = {"armed": False, "resolution": None, "table": Membership(epoch=3, members=members), **over, **changes}
    return Persist(
        jobs=(job(job_id, **fields),),
        ranks=ranks,
        nodes=(node(job_id=job_id),),
        migrations=(migration(migration_id=f"m-{job_id}", job_id=job_id, **moved),),
        events=told,
    )
