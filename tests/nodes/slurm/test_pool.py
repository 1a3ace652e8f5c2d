"""The pool by what Slurm says of its reservation, and which of two ways a node takes into a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tmd.core.allocation import Allocation
from tmd.nodes.base import QueryFailed
from tmd.nodes.slurm.allocations import allocation
from tmd.nodes.slurm.commands import CommandClient
from tmd.nodes.slurm.growth import choose
from tmd.nodes.slurm.pool import Member, SlurmPool, describe, is_free, with_companions
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

GOOD = {"SchedulerParameters": "bf_interval=5,permit_job_expansion", "AccountingStorageType": "accounting_storage/slurmdbd"}


def reservation(**changes: Any) -> SlurmReservation:
    values: dict[str, Any] = {"name": "standby", "start_s": 100.0, "end_s": 1000.0, "nodes": ("n1", "n2", "n3"), "flags": ()}
    return SlurmReservation(**{**values, "users": ("alice", "-bob"), "state": "ACTIVE", **changes})


def job(job_id: str, **changes: Any) -> SlurmJob:
    values: dict[str, Any] = {"state": "RUNNING", "uid": 1000, "user": "alice", "restart_count": 0, "end_s": None}
    return SlurmJob(
        **{"job_id": job_id, **values, "batch_host": "n1", "nodes": ("n1",), "reason": "", "admin_comment": "", **changes}
    )


@pytest.mark.parametrize(
    ("version", "changes", "way", "why"),
    [
        ((22, 5), {}, "expand", "this Slurm permits it"),
        ((22, 5), {"SchedulerParameters": "bf_interval=5"}, "companion", "permit_job_expansion"),
        ((22, 5), {"AccountingStorageType": "accounting_storage/none"}, "companion", "only once"),
        ((22, 5), {"GresTypes": "gpu"}, "companion", "GresTypes=gpu"),
        ((23, 2), {}, "companion", "22.05 only"),
        ((25, 11), {}, "companion", "without licences"),
        (None, {}, "companion", "22.05 only"),
    ],
)
def test_a_job_is_expanded_only_where_that_is_known_to_work(
    version: tuple[int, int] | None, changes: dict[str, str], way: str, why: str
) -> None:
    choice = choose("auto", version, GOOD | changes)
    assert choice.way == way
    assert why in choice.why
    assert choose("companion", version, GOOD | changes).way == "companion"
    forced = choose("expansion", version, GOOD | changes)
    assert forced.way == "expand"
    assert (forced.objection == "") == (way == "expand"), "what speaks against it is said"


@pytest.mark.parametrize(
    ("base", "flags", "free"),
    [
        ("IDLE", (), True),
        ("IDLE", ("RESERVED",), True),
        ("IDLE", ("RESERVED", "DRAIN"), False),
        ("IDLE", ("NOT_RESPONDING",), False),
        ("IDLE", ("COMPLETING",), False),
        ("MIXED", ("RESERVED",), False),
        ("DOWN", (), False),
    ],
)
def test_a_node_is_free_if_it_is_sound_and_nobody_s(base: str, flags: tuple[str, ...], free: bool) -> None:
    assert is_free(SlurmNode(name="n1", base=base, flags=flags)) is free


def test_what_a_reservation_has_to_give() -> None:
    nodes = [SlurmNode(name="n1", base="ALLOCATED"), SlurmNode(name="n2", base="IDLE"), SlurmNode(name="n9", base="IDLE")]
    word = describe("standby", reservation(), nodes, 500.0)
    assert (word.nodes, word.free, word.users, word.problem) == (("n1", "n2", "n3"), ("n2",), ("alice",), "")
    assert describe("standby", reservation(accounts=("lab",)), nodes, 500.0).users == (), "Slurm alone knows who is in an account"
    assert "there is no reservation standby" in describe("standby", None, nodes, 500.0).problem
    assert "begins in 1 min" in describe("standby", reservation(), nodes, 40.0).problem
    assert "has ended" in describe("standby", reservation(), nodes, 1000.0).problem
    assert "calls reservation standby INACTIVE" in describe("standby", reservation(state="INACTIVE"), nodes, 500.0).problem


def test_a_companion_s_node_is_its_patron_s() -> None:
    word = allocation("7", "0", job("7"))
    member = Member(job("12", nodes=("n5",)), "companion", "7")
    held = with_companions(word, [member])
    assert (held.nodes, held.companions) == (("n1", "n5"), {"n5": "12"})


@pytest.mark.parametrize(
    "member",
    [
        Member(job("12", nodes=("n5",), user="mallory"), "companion", "7"),
        Member(job("12", nodes=("n5",)), "companion", "8"),
        Member(job("12", nodes=("n5",)), "companion", "7.1"),
        Member(job("12", nodes=("n5",)), "expander", "7"),
        Member(job("12", nodes=("n5",), state="COMPLETING"), "companion", "7"),
    ],
)
def test_nobody_else_s_node_is(member: Member) -> None:
    word = allocation("7", "0", job("7"))
    assert with_companions(word, [member]) == word


def pool_of(folder: Path, squeue: str) -> SlurmPool:
    """Of a Slurm whose squeue is this script: a real one does not fail on demand."""
    (folder / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (folder / "squeue").chmod(0o755)
    settings = SlurmSettings(bin_dir=str(folder), standby_reservation="standby")
    return SlurmPool(settings, CommandClient(settings))


@pytest.mark.parametrize(
    "squeue",
    [
        "kill -9 $$",
        "exit 1",
        "echo 'squeue: fatal: Unable to process configuration file' >&2; exit 1",
        "echo 'slurm_load_jobs error: Unexpected message received' >&2; exit 1",
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
    ],
)
async def test_a_squeue_that_fails_has_not_said_that_a_job_has_no_companions(tmp_path: Path, squeue: str) -> None:
    pool = pool_of(tmp_path, squeue)
    with pytest.raises(QueryFailed, match="squeue standby"):
        await pool.complete([allocation("7", "0", job("7"))])
    with pytest.raises(QueryFailed, match="squeue standby"):
        await pool.end_companion("12")


@pytest.mark.parametrize("squeue", ["exit 0", "echo 'slurm_load_jobs error: Requested reservation is invalid' >&2; exit 1"])
async def test_without_the_reservation_there_are_no_companions(tmp_path: Path, squeue: str) -> None:
    word = allocation("7", "0", job("7"))
    assert await pool_of(tmp_path, squeue).complete([word]) == [word]


def test_a_job_that_is_over_has_no_companions() -> None:
    over = Allocation(job_id="7", state="over", reason="Slurm calls the job CANCELLED", user="alice")
    assert with_companions(over, [Member(job("12", nodes=("n5",)), "companion", "7")]) == over


@pytest.mark.parametrize(
    ("comment", "asked"),
    [
        ("tmd:standby=1;nodes=16", (1, False)),
        ("site words tmd:standby=2;nodes=2-4;pool", (2, True)),
        ("tmd:standby=x;nodes=1", (0, False)),
        ("", (0, False)),
    ],
)
def test_what_a_job_was_submitted_with(comment: str, asked: tuple[int, bool]) -> None:
    word = allocation("7", "0", job("7", admin_comment=comment))
    assert (word.standby, word.pooled) == asked
