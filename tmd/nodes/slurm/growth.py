"""How a node of the pool comes into a job: by expansion where Slurm can do that, by a companion job elsewhere.

Expansion makes the node the job's own. 22.05 does it for a job's user, several times on one job, if slurm.conf permits it, if
slurmdbd keeps the books, and if Slurm knows no devices: jobs with GPUs are refused half-way, and the node is lost (run).
25.11's slurmctld ends if neither job has a licence (read). A companion job needs nothing of all that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from tmd.core.pool import Way

#: The version on which expansion was run again and again.
EXPANDING = (22, 5)
Wish = Literal["auto", "expansion", "companion"]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The way that is gone, why, and what speaks against it if somebody wished for it; empty: nothing does."""

    way: Way
    why: str
    objection: str = ""


def choose(wish: Wish, version: tuple[int, int] | None, config: Mapping[str, str]) -> Choice:
    """`config`: as `scontrol show config` tells it (tmd.nodes.slurm.configuration)."""
    obstacle = _obstacle(version, config)
    if wish == "expansion":
        return Choice("expand", "growth in [slurm] says so", obstacle)
    if wish == "companion":
        return Choice("companion", "growth in [slurm] says so")
    if obstacle:
        return Choice("companion", obstacle)
    return Choice("expand", "this Slurm permits it, keeps its books in slurmdbd and knows no devices")


def _obstacle(version: tuple[int, int] | None, config: Mapping[str, str]) -> str:
    """Why a job cannot be expanded here; empty: it can."""
    words = config.get("SchedulerParameters", "").split(",")
    if "permit_job_expansion" not in words:
        return "SchedulerParameters lacks permit_job_expansion, so this Slurm expands no job"
    if version is not None and version >= (25, 11):
        return f"slurmctld {version[0]}.{version[1]:02} ends if it merges two jobs without licences"
    if version != EXPANDING:
        return "expansion was tried with Slurm 22.05 only"
    if "slurmdbd" not in config.get("AccountingStorageType", ""):
        return "without slurmdbd Slurm 22.05 changes a job's size only once"
    devices = config.get("GresTypes", "")
    if devices:
        return f"GresTypes={devices}: Slurm 22.05 cannot merge jobs that have devices"
    return ""
