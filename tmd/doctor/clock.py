"""Clocks: munge refuses credentials of machines whose clocks differ by more than their life time."""

from __future__ import annotations

from collections.abc import Iterator

from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, skipped, warning
from tmd.munge.library import TTL_S

#: slurmctld tells the time in whole seconds, so less than this is no difference.
NOTICED_S = 2.0
_REMEDY = "repair time synchronisation on both machines: chronyc tracking"


def check_clock(_: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    if slurm.clock_s is None:
        yield skipped("clock", "not compared with slurmctld's: this Slurm does not tell the time as a number")
        return
    difference_s = off_by_s(slurm.clock_s, *slurm.asked_s)
    seen = f"{difference_s:.0f} s off slurmctld's"
    if difference_s >= TTL_S / 2:
        yield fault("clock", f"{seen}: munge's credentials live {TTL_S} s", _REMEDY)
    elif difference_s >= NOTICED_S:
        yield warning("clock", seen, _REMEDY)
    else:
        yield ok("clock", "that of slurmctld, to the second; clocks of compute nodes cannot be seen from here")


def off_by_s(theirs_s: int, before_s: float, after_s: float) -> float:
    """By how much their clock is surely off, if it was read, in whole seconds, between two moments of ours."""
    return max(0.0, before_s - (theirs_s + 1), theirs_s - after_s)
