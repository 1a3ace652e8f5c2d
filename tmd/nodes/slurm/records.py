"""Nodes, jobs and reservations as Slurm tells of them, whichever way it was asked. Times are seconds since 1970."""

from __future__ import annotations

import msgspec

#: States of a job in which it may hold nodes.
HOLDING_STATES = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node: a base state plus flags. `reason` is somebody's own text, without the [user@time] that Slurm shows after it."""

    name: str
    #: IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN, ERROR or FUTURE.
    base: str
    #: As in DRAIN, COMPLETING, NOT_RESPONDING, MAINTENANCE, REBOOT_REQUESTED, RESERVED, PLANNED.
    flags: tuple[str, ...] = ()
    address: str = ""
    features: tuple[str, ...] = ()
    reason: str = ""
    reason_user: str = ""
    reason_s: float | None = None
    #: A node that has booted since is not the one that a job knew.
    boot_s: float | None = None

    @property
    def state(self) -> str:
        """Base and flags in one word, as operators know it."""
        return "+".join((self.base, *self.flags))


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. (job_id, restart_count) is one life of it: a requeued job keeps its id."""

    job_id: str
    #: As in PENDING, RUNNING, COMPLETING, TIMEOUT.
    state: str
    uid: int
    user: str
    restart_count: int
    #: When its time limit ends it, or when it ended; None: no limit, or not started.
    end_s: float | None
    #: Where the batch script runs; empty for a job without one, or one that does not run.
    batch_host: str
    #: The nodes that it holds, or held if it has ended.
    nodes: tuple[str, ...]
    #: Why it waits or ended, in Slurm's words.
    reason: str
    admin_comment: str
    #: The reservation that it runs in; empty: none.
    reservation: str = ""
    #: When it was preempted: its grace time, if any, ends at `end_s`, which Slurm tells only of a job with a time limit. None: it
    #: was not.
    preempted_s: float | None = None

    @property
    def life(self) -> str:
        """What tmd calls this life of the job, as its agents do: "7", and "7.1" once it was requeued."""
        return f"{self.job_id}.{self.restart_count}" if self.restart_count else self.job_id

    @property
    def held_nodes(self) -> tuple[str, ...]:
        """None of a job that has ended."""
        return self.nodes if self.state in HOLDING_STATES else ()


class SlurmReservation(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation. `flags` as in MAINT, IGNORE_JOBS; `state` is ACTIVE or INACTIVE."""

    name: str
    start_s: float
    end_s: float
    nodes: tuple[str, ...]
    flags: tuple[str, ...]
    users: tuple[str, ...]
    state: str
    accounts: tuple[str, ...] = ()

    @property
    def is_maintenance(self) -> bool:
        """Nodes are taken for maintenance at a time that is known. One with TIME_FLOAT is always as far ahead as it was made."""
        return "MAINT" in self.flags and "TIME_FLOAT" not in self.flags
