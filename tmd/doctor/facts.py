"""What is known of an installation before it is judged: its configuration, and what its daemon and its Slurm have said."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tmd.config import Config
from tmd.nodes.slurm.configuration import version_in
from tmd.nodes.slurm.records import SlurmJob, SlurmReservation

_TAKEN = re.compile(r"^Configuration data as of (\d+)$", re.MULTILINE)
_USER = re.compile(r"(.*)\((\d+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonFacts:
    """A daemon that has answered. `status` and `jobs` are those of tmd.api.reading; `uid` is whose process it is."""

    uid: int
    status: Mapping[str, Any]
    jobs: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmFacts:
    """A slurmctld that has answered."""

    #: What `scontrol show config` says, without the keys that have no value.
    config: Mapping[str, str]
    #: How tmd asks Slurm here: "pyslurm 25.11", "Slurm's commands".
    client: str
    #: As `scontrol --version` says it: "slurm-wlm 22.05.8".
    commands_version: str = ""
    jobs: tuple[SlurmJob, ...] = ()
    #: slurmctld's clock, in whole seconds since 1970, and this machine's before and after it was asked.
    clock_s: int | None = None
    asked_s: tuple[float, float] = (0.0, 0.0)
    reservations: tuple[SlurmReservation, ...] = ()

    @property
    def version(self) -> tuple[int, int] | None:
        """Of slurmctld."""
        return version_in(self.config.get("SLURM_VERSION", ""))

    def words(self, key: str) -> list[str]:
        """A value that is a list with commas."""
        return [word.strip() for word in self.config.get(key, "").split(",") if word.strip()]

    @property
    def slurm_user(self) -> tuple[str, int] | None:
        """Name and uid of the user that slurmctld runs as."""
        found = _USER.fullmatch(self.config.get("SlurmUser", ""))
        return (found[1], int(found[2])) if found else None

    @property
    def conf(self) -> Path:
        """slurm.conf as slurmctld has read it."""
        return Path(self.config.get("SLURM_CONF", "/etc/slurm/slurm.conf"))

    @property
    def plugin_dirs(self) -> tuple[Path, ...]:
        return tuple(Path(part) for part in self.config.get("PluginDir", "").split(":") if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """None: it has not answered, or there is none."""

    config: Config
    daemon: DaemonFacts | None = None
    slurm: SlurmFacts | None = None


def parse_clock(text: str) -> int | None:
    """When slurmctld said so, by its own clock, if the times in `scontrol show config` are numbers (SLURM_TIME_FORMAT=%s)."""
    found = _TAKEN.search(text)
    return int(found[1]) if found else None
