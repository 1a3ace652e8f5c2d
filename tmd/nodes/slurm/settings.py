"""How Slurm is asked, and how often. The descriptions become etc/tmd.toml and the tables of docs/operators.md."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class SlurmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[slurm]`: only with `resource_manager = "slurm"`."""

    client: Annotated[
        Literal["auto", "commands", "pyslurm"],
        Meta(
            description="How slurmctld is spoken to. commands: scontrol and squeue, with every version. pyslurm: the Python "
            "package, which must be of Slurm's own version. auto: pyslurm if it is installed and matches, else the commands."
        ),
    ] = "auto"
    bin_dir: Annotated[
        str,
        Meta(
            description="Where scontrol and squeue are, with standby_reservation scancel too.",
            extra={"default": "PATH", "example": '"/opt/slurm/bin"'},
        ),
    ] = ""
    conf: Annotated[
        str,
        Meta(
            description="Slurm's own configuration file.",
            extra={"default": "$SLURM_CONF, else what Slurm was built with", "example": '"/etc/slurm/slurm.conf"'},
        ),
    ] = ""
    poll_min_s: Annotated[
        float,
        Meta(
            description="Node states are asked for again after twenty times what the last answer took, but no sooner than this. "
            "Raise it to spare slurmctld."
        ),
    ] = 0.1
    poll_max_s: Annotated[float, Meta(description="Node states are asked for again after this long at the latest.")] = 1.0
    query_timeout_s: Annotated[
        float,
        Meta(description="A question that slurmctld has not answered after this long makes every node's state unknown."),
    ] = 5.0
    change_timeout_s: Annotated[
        float,
        Meta(
            description="A drain, a resume or a smaller job may take this long. Slurm waits for its database in some of them, "
            "and for a lock where many jobs start."
        ),
    ] = 20.0
    hint_socket: Annotated[
        str,
        Meta(
            description="Unix datagram socket on which the slurmctld plugin says that something has changed. Whatever comes "
            "there makes tmd ask at once, and is not believed itself. A path of at most 107 bytes, in a directory that "
            "SlurmUser may enter.",
            extra={"default": "none: node states are polled only", "example": '"/run/tmd/hints.sock"'},
        ),
    ] = ""

    standby_reservation: Annotated[
        str,
        Meta(
            description="Reservation whose nodes serve as standbys for jobs that have none of their own left; see docs/slurm.md.",
            extra={"default": "none: a job has only the standbys that --standby=N gave it", "example": '"standby"'},
        ),
    ] = ""
    refill: Annotated[
        bool,
        Meta(
            description="A job with --standby=N whose standby was used gets another one from the reservation at once. false: "
            "a node is taken only when ranks must move or were lost."
        ),
    ] = True
    pool_nodes_per_job: Annotated[
        int,
        Meta(description="How many nodes of the reservation one job may hold at a time, those that it trains on among them."),
    ] = 4
    growth: Annotated[
        Literal["auto", "expansion", "companion"],
        Meta(
            description="How a node of the reservation comes into a job. expansion: it becomes the job's own. companion: a "
            "second job of the same user runs there. auto: expansion where Slurm can do it; tmctl doctor says which and why."
        ),
    ] = "auto"

    def pause_s(self, cost_s: float) -> float:
        """How long after an answer that took `cost_s` the next question is due."""
        return min(max(20 * cost_s, self.poll_min_s), self.poll_max_s)

    def problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        if self.poll_min_s > self.poll_max_s:
            return f"expected at most slurm.poll_max_s ({self.poll_max_s}), got {self.poll_min_s}"
        return ""
