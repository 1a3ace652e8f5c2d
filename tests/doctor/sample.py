"""What Slurm 22.05 has printed once, and facts made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tmd.config import Config
from tmd.doctor.facts import DaemonFacts, Facts, SlurmFacts, parse_clock
from tmd.nodes.slurm.configuration import parse_config

#: `scontrol show config` of the tests' own cluster with tmd's plugins, under other paths and with another SlurmUser.
CONFIG_22_05 = (Path(__file__).parent / "samples" / "config-22.05.txt").read_text()

FACTS = Facts(Config())


def slurm(**changes: str) -> SlurmFacts:
    """The sample's slurmctld with other values; "" takes a key out."""
    config = {key: value for key, value in (parse_config(CONFIG_22_05) | changes).items() if value}
    clock_s = parse_clock(CONFIG_22_05)
    assert clock_s is not None
    return SlurmFacts(config, "Slurm's commands", "slurm-wlm 22.05.8", (), clock_s, (clock_s, clock_s + 0.1))


def daemon(uid: int = 0, jobs: tuple[dict[str, Any], ...] = (), **changes: Any) -> DaemonFacts:
    """A healthy daemon, as GET /v1/status says it."""
    status = {
        "tmd_version": "0.1.0",
        "generation": 3,
        "paused": False,
        "observe_only": False,
        "resource_manager": "slurm",
        "ledger": {"url": "sqlite:////var/lib/tmd/ledger.db", "healthy": True, "error": ""},
    }
    return DaemonFacts(uid, status | changes, jobs)
