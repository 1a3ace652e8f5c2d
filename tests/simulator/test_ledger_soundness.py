"""What `tmctl ledger check` demands of a ledger holds after everything that the daemon's core writes, whatever goes wrong."""

from __future__ import annotations

import pytest

from tests.simulator.daemon import SimLedger
from tests.simulator.run import run_seed
from tmd.core.instructions import Persist
from tmd.ledger.soundness import contradictions

SEEDS = 150


def test_no_write_of_the_core_contradicts_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    looked = 0
    write = SimLedger.write

    def written(ledger: SimLedger, rows: Persist) -> None:
        nonlocal looked
        write(ledger, rows)
        found.extend(contradictions(ledger.snapshot()))
        looked += 1

    monkeypatch.setattr(SimLedger, "write", written)
    for seed in range(SEEDS):
        outcome = run_seed(seed)
        assert not outcome.violation
        assert not found, f"seed {seed}: {found[:3]}"
    assert looked > 20 * SEEDS
