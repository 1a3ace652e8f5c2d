"""What Slurm's states of a node mean to tmd, and that docs/slurm.md says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tmd.nodes.base import LEAVING_FLAGS, NodeView
from tmd.nodes.slurm.parsing import parse_state

DOCUMENT = Path(__file__).parents[3] / "docs" / "slurm.md"


def meaning(state: str) -> str:
    base, flags = parse_state(state)
    return NodeView(name="n1", base=base, flags=flags).meaning


@pytest.mark.parametrize(
    ("state", "means"),
    [
        ("IDLE", "up"),
        ("ALLOCATED+NOT_RESPONDING", "up"),
        ("MIXED+PLANNED", "up"),
        ("ALLOCATED+RESERVED", "up"),
        ("ALLOCATED+MAINTENANCE", "up"),
        ("IDLE+POWERING_UP", "up"),
        ("IDLE+CLOUD+POWERED_DOWN", "up"),
        ("ALLOCATED+DRAIN", "draining"),
        ("MIXED+FAIL", "draining"),
        ("ALLOCATED+REBOOT_REQUESTED", "draining"),
        ("ALLOCATED+DRAIN+REBOOT_REQUESTED", "draining"),
        ("MIXED+POWER_DOWN", "draining"),
        ("ALLOCATED+INVALID_REG", "draining"),
        ("UNKNOWN+DRAIN", "draining"),
        ("IDLE+DRAIN", "drained"),
        ("IDLE+DRAIN+REBOOT_ISSUED", "drained"),
        ("IDLE+COMPLETING+DRAIN", "draining"),
        ("DOWN", "down"),
        ("DOWN+NOT_RESPONDING", "down"),
        ("DOWN+DRAIN+REBOOT_ISSUED", "down"),
        ("UNKNOWN+NOT_RESPONDING", "unknown"),
        ("FUTURE", "unknown"),
        ("ERROR", "unknown"),
    ],
)
def test_each_state_means_what_operators_expect(state: str, means: str) -> None:
    assert meaning(state) == means


def test_the_document_names_the_flags_of_nodes_that_are_left() -> None:
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith("| with `DRAIN`"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[1])) == LEAVING_FLAGS
