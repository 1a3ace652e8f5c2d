"""The demo's report: its shape is what other programs read, and its judgement must see what went wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tmd.core.records import PHASES
from tmd.demo.losses import Comparison, RunResult
from tmd.demo.report import document, shortcomings
from tmd.demo.run import Run


def record(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "state": "done",
        "trigger": "operator root",
        "reason": "",
        "leavers": {"1": "j.1"},
        "from_nodes": ["n2"],
        "to_nodes": ["n5"],
        "phases_s": dict.fromkeys(PHASES, 0.01),
        "normal_step_s": 0.2,
        "downtime_s": 0.25,
        "downtime_steps": 1.25,
        "lost_time_s": 0.5,
        "steps_redone": 0,
        "stayer_links_reopened": 0,
        "bytes_moved": 1000,
        **changes,
    }


def report(*records: dict[str, Any], identical: bool = True, restarted: int = 0, approximations: tuple[str, ...] = ()) -> Any:
    run = Run(RunResult({}, {}, {}, ()), records, frozenset(), restarted, approximations)
    return document(run, Comparison(identical, () if identical else ("rank 0 step 3",), 0), 0.2)


def test_the_report_has_the_shape_that_is_documented() -> None:
    made = report(record("planned"), record("unplanned"))
    assert (made["bit_identical"], made["undisturbed_step_ms"], made["stayers_restarted"]) == (True, 200.0, 0)
    planned = made["migrations"][0]
    assert planned["kind"] == "planned"
    assert planned["phases"] == dict.fromkeys(PHASES, 10.0)
    assert (planned["downtime_ms"], planned["downtime_steps"], planned["lost_time_ms"]) == (250.0, 1.25, 500.0)
    assert planned["normal_step_ms"] == 200.0
    assert (planned["steps_redone"], planned["stayer_links_reopened"]) == (0, 0)


def test_a_good_run_has_no_shortcomings() -> None:
    assert shortcomings(report(record("planned"), record("unplanned"))) == []


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (report(record("planned"), record("unplanned"), identical=False), "differs"),
        (report(record("planned"), record("unplanned"), approximations=("step 3: RNG",)), "differs"),
        (report(record("planned"), record("unplanned"), restarted=1), "1 ranks had to restart"),
        (report(record("planned", state="aborted"), record("unplanned")), "done were ['unplanned']"),
        (report(record("planned", stayer_links_reopened=2), record("unplanned")), "2 links between stayers"),
    ],
)
def test_everything_that_must_not_happen_is_a_shortcoming(made: Any, says: str) -> None:
    assert says in " ".join(shortcomings(made))


def test_links_that_a_recovery_opens_anew_are_none() -> None:
    assert shortcomings(report(record("planned"), record("unplanned", stayer_links_reopened=6))) == []
