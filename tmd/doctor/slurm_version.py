"""Which Slurm it is, and how tmd asks it."""

from __future__ import annotations

from collections.abc import Iterator

from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, warning
from tmd.nodes.slurm.configuration import version_in

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


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02}"
