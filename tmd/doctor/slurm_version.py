"""Which Slurm it is, how tmd asks it, and in which way jobs come by further nodes with it."""

from __future__ import annotations

from collections.abc import Iterator

from tmd.doctor.facts import Facts, SlurmFacts, version_in
from tmd.doctor.findings import Finding, fault, ok, warning

#: Older ones print other things.
OLDEST = (22, 5)
#: What tmd's tests have run on, as a cluster or through pyslurm.
TRIED = ((22, 5), (25, 11))


def check_version(_: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    told = slurm.config.get("SLURM_VERSION", "?")
    if slurm.version is None:
        yield fault("slurm", f"slurmctld says {told!r} for its version", "tell the authors of tmd which Slurm says so")
    elif slurm.version < OLDEST:
        yield fault("slurm", f"Slurm {told} is too old", f"tmd needs {_shown(OLDEST)} or newer")
    elif slurm.version not in TRIED:
        tried = " and ".join(map(_shown, TRIED))
        seen = f"Slurm {told}, asked through {slurm.client}; tmd was tried with {tried}"
        yield warning("slurm", seen, "try a drain and a lost node on a test job before you rely on it")
    else:
        yield ok("slurm", f"Slurm {told}, asked through {slurm.client}")
    commands = version_in(slurm.commands_version)
    if commands != slurm.version:
        seen = f"the commands are of {slurm.commands_version}, slurmctld of {told}"
        yield warning("slurm", seen, "name the directory of its own commands: bin_dir in [slurm]")


def check_growth(_: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    yield ok("growth", f"{GROWTH}; {possible_growth(slurm)}")


#: What this version of tmd does.
GROWTH = "a job's standby nodes are those that --standby=N gave it when it started, tmd adds no node to a running job"


def possible_growth(slurm: SlurmFacts) -> str:
    """What Slurm would allow, by its version and configuration."""
    if "permit_job_expansion" not in slurm.words("SchedulerParameters"):
        return "this Slurm could serve a companion job of the same user only, not an expansion"
    if slurm.version is not None and slurm.version >= (25, 11) and "Licenses" not in slurm.config:
        return "this Slurm permits expansion, and its slurmctld crashes on it unless jobs have a licence"
    return "this Slurm would permit expansion"


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02}"
