"""The transfer of a state over RDMA between two hosts, for real: two virtual machines with soft RoCE, and faults in the middle.

What the two do is in `guest/`; here is what must have come of it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.rdma.report import Results, facts
from tmd_worker.handoff import verbs

#: `read` against perftest's ib_read_bw, in turns on the same two machines: figures for people, nothing that a test could hold to.
BANDWIDTH = Path("out/rdma/bandwidth.json")


def test_the_port_is_found_and_what_is_in_the_way_is_named(results: Results) -> None:
    found = facts(results, "probe")
    assert found["usable"] == ""
    assert (found["port"], found["kind"]) == ("rxe0/1", "RoCE v2 IPv4")
    assert found["gid"].endswith("ffff:0a50:0002")
    assert "the limit on locked memory is 4096 bytes" in found["limited"]
    assert "rxe0/1 is DOWN" in found["down"]
    assert found["again"] == ""


@pytest.mark.parametrize(("name", "entries"), [("read", 3), ("odd", 16), ("thousand", 1000), ("nothing", 2)])
def test_every_byte_arrives_and_none_is_written_beside(results: Results, name: str, entries: int) -> None:
    found = facts(results, name)
    assert (found["entries"], found["missing"]) == (entries, 0)
    assert found["equal"]
    assert found["guarded"]


@pytest.mark.parametrize("attempt", ["wrong", "others", "beside", "write"])
def test_what_was_not_exported_to_this_joiner_for_reading_is_refused(results: Results, attempt: str) -> None:
    found = facts(results, "keys")
    assert "the source refused: " in found[attempt]["reason"]
    assert found[attempt]["untouched"]
    assert found[attempt]["missing"] > 0
    assert found["unharmed"]


def test_a_handoff_that_the_source_has_ended_cannot_be_read(results: Results) -> None:
    found = facts(results, "keys")["closed"]
    assert found["reason"].startswith("rdma: ")
    assert found["untouched"]
    assert found["missing"] > 0


def test_an_address_that_cannot_be_reached_is_named(results: Results) -> None:
    found = facts(results, "nowhere")
    assert "0a51:0001: the peer's address did not answer" in found["unrouted"]
    assert "0a50:0063: the peer's address did not answer" in found["absent"]


def test_a_source_that_is_killed_in_the_middle_is_left_and_another_finishes(results: Results) -> None:
    found = facts(results, "source_killed")
    assert "the source does not answer" in found["reason"]
    assert found["missing"] > 0
    assert found["equal"]
    assert found["guarded"]


def test_a_link_that_goes_down_in_the_middle_is_named_and_the_rest_goes_over_tcp(results: Results) -> None:
    found = facts(results, "link_down")
    assert "port rxe0/1 of this machine is DOWN" in found["reason"]
    assert found["missing"] > 0
    assert found["equal"]
    assert found["guarded"]
    assert found["again"] == ""
    assert found["next"]


def test_a_link_that_goes_down_on_the_sources_side_ends_by_deadline_and_the_rest_goes_over_tcp(results: Results) -> None:
    found = facts(results, "peer_down")
    assert "the source does not answer" in found["reason"] or "did not come in" in found["reason"]
    assert found["missing"] > 0
    assert found["equal"]
    assert found["guarded"]


def test_a_joiner_that_is_killed_harms_nobody(results: Results) -> None:
    found = facts(results, "joiner_killed")
    assert (found["signal"], found["said"]) == (9, "")
    assert found["unharmed"]
    assert found["next"]


def test_reading_is_measured_against_perftest(results: Results) -> None:
    found = facts(results, "bandwidth")
    assert len(found["read_mib_s"]) == len(found["ib_read_bw_mib_s"]) == 3
    assert min(*found["read_mib_s"], *found["ib_read_bw_mib_s"], found["ratio"]) > 0
    BANDWIDTH.parent.mkdir(parents=True, exist_ok=True)
    BANDWIDTH.write_text(json.dumps(found, indent=1) + "\n")


def test_the_numbers_are_those_of_pyverbs() -> None:
    verbs.load()
    spellings = []
    for name in ("pyverbs.enums", "pyverbs.libibverbs_enums"):
        try:
            spellings.append(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
    assert spellings
    theirs = vars(spellings[0])
    for ours in ("QPT_RC", "ACCESS_LOCAL_WRITE", "ACCESS_REMOTE_READ", "WR_RDMA_READ", "SEND_SIGNALED", "WC_SUCCESS"):
        assert getattr(verbs, ours) == theirs[f"IBV_{ours}"]
    for ours in ("WC_REM_ACCESS_ERR", "WC_RETRY_EXC_ERR"):
        assert getattr(verbs, ours) == theirs[f"IBV_{ours}"]
