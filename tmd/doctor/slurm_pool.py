"""The pool of standby nodes: the reservation, who may use it, and how its nodes come into jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tmd.core import words
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, warning
from tmd.nodes.slurm import growth
from tmd.nodes.slurm.allocations import asked_for
from tmd.nodes.slurm.records import SlurmJob, SlurmReservation

#: How a reservation for this is made. ACCOUNTS: of the people whose jobs may use it.
CREATE = (
    "scontrol create reservation ReservationName={name} StartTime=now Duration=infinite Nodes=NODES Accounts=ACCOUNTS "
    "Flags=IGNORE_JOBS"
)


def check_growth(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    """Which of the two ways is gone, and why."""
    settings = facts.config.slurm
    if not settings.standby_reservation:
        yield ok("growth", "no standby_reservation in [slurm]: a job has the standby nodes that --standby=N gave it at its start")
        return
    choice = growth.choose(settings.growth, slurm.version, slurm.config)
    how = "by expansion" if choice.way == "expand" else "by companion jobs"
    seen = f"nodes of the reservation come into jobs {how}: {choice.why}"
    if choice.objection:
        yield fault("growth", f"{seen}; but {choice.objection}", 'growth = "companion" in [slurm], or "auto"')
    else:
        yield ok("growth", seen)


def check_pool(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    name = facts.config.slurm.standby_reservation
    waiting = [job for job in slurm.jobs if job.state == "RUNNING" and asked_for(job)[1]]
    if not name:
        for job in waiting:
            seen = f"job {job.job_id} counts on a pool of nodes (--standby=N:pool), and there is none"
            yield warning("pool", seen, "standby_reservation in [slurm], or submit it with --standby=N")
        return
    found = next((each for each in slurm.reservations if each.name == name), None)
    if found is None:
        yield fault("pool", f"there is no reservation {name}: no node can come from it", CREATE.format(name=name))
        return
    yield _times(found, time.time())
    yield from _people(found, [job for job in slurm.jobs if job.state == "RUNNING" and asked_for(job)[0]])


def _times(found: SlurmReservation, now_s: float) -> Finding:
    nodes = words.count(len(found.nodes), "node")
    if not found.nodes:
        return fault("pool", f"reservation {found.name} has no node", f"scontrol update reservation={found.name} Nodes=NODES")
    if found.end_s <= now_s:
        return fault("pool", f"reservation {found.name} has ended", f"scontrol update reservation={found.name} Duration=infinite")
    if found.start_s > now_s:
        seen = f"reservation {found.name} ({nodes}) has not begun"
        return warning("pool", seen, f"scontrol update reservation={found.name} StartTime=now")
    return ok("pool", f"reservation {found.name} has {nodes}")


def _people(found: SlurmReservation, jobs: list[SlurmJob]) -> Iterator[Finding]:
    """Slurm gives a node only to whom the reservation is for. The daemon's rights do not help: the job's user takes it."""
    if found.accounts:
        return
    for user in sorted({job.user for job in jobs} - set(found.users)):
        numbers = ", ".join(job.job_id for job in jobs if job.user == user)
        seen = f"reservation {found.name} is for {', '.join(found.users)}, not for {user} (job {numbers})"
        yield fault("pool", seen, f"scontrol update reservation={found.name} Users+={user}, or Accounts= instead of Users=")
