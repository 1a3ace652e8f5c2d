"""What the guests reported, and out/rdma/migration.json: that a whole migration over rdma was shown.

`python -m tests.rdma.report` prints it, and fails if it is not there: what has not run has not passed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.rdma.machine import CONSOLES

Results = dict[str, dict[str, Any]]
MIGRATION = CONSOLES / "migration.json"


def facts(results: Results, name: str) -> dict[str, Any]:
    """What a scenario has found out. Raises AssertionError if it has not come to its end."""
    assert name in results, f"the second machine did not report {name}"
    assert "failed" not in results[name], results[name]["failed"]
    return results[name]


def main() -> None:
    if not MIGRATION.exists():
        sys.exit("not shown in this run: a whole migration over rdma between two machines")
    shown = json.loads(MIGRATION.read_text())
    print(
        f"a whole migration between two machines: rank {shown['rank']}, {shown['from_node']} to {shown['to_node']}, before step "
        f"{shown['first_step']} of {shown['steps']}, {shown['bytes_by_transport']['rdma']} bytes over rdma; losses and states "
        f"bit-identical to the undisturbed run; {shown['seconds']:.0f} s with the start of all processes"
    )


if __name__ == "__main__":
    main()
