"""One whole migration of a job over RDMA between two hosts: daemon, agents and ranks in the two virtual machines.

What is started there, and when, is in `guest/migration.py`; here is what must have come of it.
"""

from __future__ import annotations

import json
from typing import Any

from tests.rdma.guest.migration import MOVED_RANK, STEPS
from tests.rdma.report import MIGRATION, Results, facts

RANKS = ("0", "1")
MOVED = str(MOVED_RANK)
#: The table alone, which is part of the state.
LEAST_BYTES = 8 << 20


def test_a_rank_moves_to_the_other_host_over_rdma_and_no_bit_changes(results: Results) -> None:
    found = facts(results, "migration")
    record = found["migration"]
    assert (record["kind"], record["state"], list(record["leavers"])) == ("planned", "done", [MOVED])
    assert (record["from_nodes"], record["to_nodes"]) == (["n2"], ["n3"])
    assert (record["steps_redone"], record["stayer_links_reopened"], record["record_origin"]) == (0, 0, "exact")

    handoff = record["handoffs"][MOVED]
    assert (handoff["transport"], handoff["source"]) == ("rdma", f"rank {MOVED} on n2")
    assert list(handoff["bytes_by_transport"]) == ["rdma"], handoff["why"]
    assert handoff["bytes_by_transport"]["rdma"] >= LEAST_BYTES

    undisturbed = found["undisturbed"]
    for each in (found, undisturbed):
        assert (each["job"]["state"], each["job"]["steps"], each["job"]["approximations"]) == ("done", STEPS, [])
        assert each["agent_exit"] == 0

    first, second = found["rows"]["1"], found["rows"]["2"]
    assert (steps(first["0"]), second["0"]) == (list(range(STEPS)), []), "rank 0 has stayed on the first host"
    assert first[MOVED], f"rank {MOVED} began on the first host"
    assert second[MOVED], f"rank {MOVED} went on on the second host"
    assert steps(first[MOVED] + second[MOVED]) == list(range(STEPS))
    expected = undisturbed["rows"]["1"]["0"], undisturbed["rows"]["2"]["1"]
    for rank in RANKS:
        assert first[rank] + second[rank] == expected[int(rank)], f"rank {rank} differs from the undisturbed run"
    assert "parameters" in second[MOVED][-1], "the final state was not digested"

    shown = {
        "rank": MOVED_RANK,
        "from_node": "n2",
        "to_node": "n3",
        "first_step": second[MOVED][0]["step"],
        "steps": STEPS,
        "seconds": found["seconds"],
        "seconds_until": found["parts_s"],
        "bytes_by_transport": handoff["bytes_by_transport"],
        "why": handoff["why"],
        "phases_s": record["phases_s"],
        "parts_s": handoff["parts_s"],
    }
    MIGRATION.write_text(json.dumps(shown, indent=1) + "\n")


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]
