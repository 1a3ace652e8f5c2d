"""A few seeds of the simulator, and proof that it finds what is wrong: every planted bug within a bounded number of seeds.

The whole of it: `python -m tests.simulator --seeds 0:10000 --jobs 2`.
"""

from __future__ import annotations

import pytest

from tests.simulator import bugs
from tests.simulator.run import run_seed

SEEDS = 150
#: A planted bug is found within this many seeds.
BOUND = 400


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_no_rule_is_broken(first: int) -> None:
    broken = [outcome for outcome in map(run_seed, range(first, first + 10)) if outcome.violation]
    assert not broken, "\n".join(f"seed {outcome.seed}: {outcome.violation}" for outcome in broken)


@pytest.mark.parametrize("bug", bugs.NAMES)
def test_a_planted_bug_is_found(bug: str) -> None:
    """A rule ends the seed, not a core that crashes because of a careless patch; without the bug the same seed is sound."""
    found = next((outcome for seed in range(BOUND) if (outcome := run_seed(seed, bug=bug)).violation and outcome.rule), None)
    assert found is not None, f"{bug} was not found in {BOUND} seeds"
    assert run_seed(found.seed).violation == ""


def test_a_seed_replays_exactly() -> None:
    assert run_seed(7) == run_seed(7)
    assert run_seed(7) != run_seed(8)


def test_an_unknown_bug_is_refused() -> None:
    with pytest.raises(ValueError, match="no bug is called 'typo'"):
        run_seed(0, bug="typo")
