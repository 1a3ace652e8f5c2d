"""slurmctld's own configuration, as `scontrol show config` tells it."""

from __future__ import annotations

import re

_CONFIG_LINE = re.compile(r"^(\w+(?:\[\d+\])?)\s*= ?(.*)$", re.MULTILINE)
_VERSION = re.compile(r"(\d+)\.(\d+)")


def parse_config(text: str) -> dict[str, str]:
    """Keys and values, without the keys that have none."""
    return {key: value for key, value in _CONFIG_LINE.findall(text) if value.strip() not in ("", "(null)", "N/A")}


def version_in(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version of Slurm."""
    found = _VERSION.search(text)
    return (int(found[1]), int(found[2])) if found else None
