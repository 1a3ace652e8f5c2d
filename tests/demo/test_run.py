"""What the demo says while a run goes on. The stack is a stand-in that gives canned answers: real runs are in `make demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tmd.demo.run import Shape, run
from tmd.demo.stack import Stack

SHAPE = Shape(nodes=1, standbys=1, steps=1, script=Path("train.py"))


def job(state: str, migrations: dict[str, str]) -> dict[str, Any]:
    under_way = [{"record": {"migration_id": name}, "sentence": sentence} for name, sentence in migrations.items()]
    record = {"state": state, "epoch": 0, "approximations": []}
    return {"record": record, "ranks": [], "next_step": 1, "sentence": state, "migrations": under_way}


class StandIn:
    """The job is seen in one state after the other; both migrations have ended when they are not among those under way."""

    def __init__(self) -> None:
        self.client = self
        self._jobs = [
            job("running", {"m1": "waiting for a standby"}),
            job("running", {}),
            job("recovering", {"m2": "rank 0 must be replaced"}),
            job("done", {}),
        ]
        self._seen: set[str] = set()

    def submit(self, **_: Any) -> str:
        return "local-1"

    def job(self, _: str) -> dict[str, Any]:
        view = self._jobs.pop(0)
        self._open = {each["record"]["migration_id"] for each in view["migrations"]}
        self._seen |= self._open
        return view

    def get(self, target: str) -> Any:
        if target == "/v1/local/jobs/local-1":
            return {"agents": []}
        assert target == "/v1/migrations?job=local-1"
        return {"migrations": [{"record": self._record(name)} for name in sorted(self._seen, reverse=True)]}

    def _record(self, name: str) -> dict[str, Any]:
        ended = name not in self._open
        record = {"migration_id": name, "started_s": float(name[1:]), "ended_s": 9.0 if ended else None}
        return record | {"state": "done" if ended else "copying", "reason": "rank 0 moved" if ended else ""}


def test_the_last_word_about_a_migration_is_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.demo.run.POLL_S", 0.0)
    (tmp_path / "losses-rank0.jsonl").write_text(json.dumps({"step": 0, "loss": "0x1p+0", "time": 1.0}) + "\n")
    (tmp_path / "final-rank0.json").write_text(json.dumps({"digests": {}}))
    said: list[str] = []
    done = run(cast(Stack, StandIn()), SHAPE, tmp_path, (), said.append)
    assert said == [
        "m1: waiting for a standby",
        "m1: done: rank 0 moved",
        "m2: rank 0 must be replaced",
        "m2: done: rank 0 moved",
    ]
    assert [record["migration_id"] for record in done.migrations] == ["m1", "m2"]
