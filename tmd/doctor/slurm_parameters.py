"""What slurm.conf has to say for nodes to be given back, lost nodes to be survived, and sick ones to be noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, warning

#: Longer than Slurm's own default.
LONG_TIMEOUT_S = 300
_RECONFIGURE = "then scontrol reconfigure"


def check_parameters(_: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    yield from _resizing(slurm)
    yield from _losses(slurm)
    yield _health(slurm)


def _resizing(slurm: SlurmFacts) -> Iterator[Finding]:
    words = slurm.words("SchedulerParameters")
    line = ",".join([*(word for word in words if word != "disable_job_shrink"), "permit_job_expansion"])
    if "permit_job_expansion" not in words:
        seen = "SchedulerParameters lacks permit_job_expansion: Slurm lets no job grow by a node"
        yield fault("expansion", seen, f"SchedulerParameters={line} in {slurm.conf}, {_RECONFIGURE}")
    else:
        yield ok("expansion", "SchedulerParameters has permit_job_expansion")
    if "disable_job_shrink" in words:
        seen = "SchedulerParameters has disable_job_shrink: no job can give back a node that was emptied"
        yield fault("resizing", seen, f"take it out in {slurm.conf}, {_RECONFIGURE}")
    elif slurm.version == (22, 5) and "slurmdbd" not in slurm.config.get("AccountingStorageType", ""):
        kind = slurm.config.get("AccountingStorageType", "none")
        seen = f"AccountingStorageType={kind}: Slurm 22.05 changes a job's size only once"
        yield warning("resizing", seen, "AccountingStorageType=accounting_storage/slurmdbd, or a job keeps its second bad node")
    else:
        yield ok("resizing", "a job's size can be changed more than once")


def _losses(slurm: SlurmFacts) -> Iterator[Finding]:
    if slurm.config.get("KillOnBadExit", "0") == "0":
        yield ok("lost ranks", "KillOnBadExit=0: a step outlives a lost rank")
    elif "tmd" in slurm.words("JobSubmitPlugins"):
        yield ok("lost ranks", "KillOnBadExit=1, which jobs with --standby are spared")
    else:
        seen = "KillOnBadExit=1: a lost rank ends the whole step"
        yield warning("lost ranks", seen, f"KillOnBadExit=0 in {slurm.conf}, or srun --kill-on-bad-exit=0 in each script")
    timeout_s = _seconds(slurm.config.get("SlurmdTimeout", ""))
    if timeout_s is None or 0 < timeout_s <= LONG_TIMEOUT_S:
        yield ok("lost nodes", f"SlurmdTimeout={slurm.config.get('SlurmdTimeout', '?')}; tmd notices sooner by itself")
    else:
        what = "never calls a node down" if timeout_s == 0 else f"calls a lost node down after {timeout_s} s"
        seen = f"SlurmdTimeout={timeout_s}: Slurm {what}, and the job keeps it that long (tmd notices sooner by itself)"
        yield warning("lost nodes", seen, f"SlurmdTimeout=60 in {slurm.conf}, {_RECONFIGURE}")


def _health(slurm: SlurmFacts) -> Finding:
    program = slurm.config.get("HealthCheckProgram", "")
    interval_s = _seconds(slurm.config.get("HealthCheckInterval", ""))
    if not program:
        seen = "no HealthCheckProgram: nodes do not say what is wrong with them"
        return warning("health", seen, "HealthCheckProgram=/opt/tmd/bin/tmd-health, HealthCheckInterval=60 in slurm.conf")
    if interval_s == 0:
        return warning("health", f"HealthCheckInterval=0: {program} is never run", "HealthCheckInterval=60 in slurm.conf")
    if not program.endswith("tmd-health"):
        seen = f"HealthCheckProgram={program}, which may or may not run tmd-health"
        return warning("health", seen, "let it run tmd-health, or put it into /etc/tmd/health.d and name tmd-health here")
    return ok("health", f"HealthCheckProgram={program} each {interval_s} s; whether nodes have it cannot be seen from here")


def _seconds(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)(?: sec)?", text.strip())
    return int(found[1]) if found else None
