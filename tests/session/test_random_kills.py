"""Ranks die at random moments of random steps, three in a run. TMD_RANDOM_KILL_RUNS: how many runs; a seed repeats its run."""

from __future__ import annotations

import os
import random

import pytest

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome
from tests.session.test_unplanned import MOMENTS, WITH_GLOO
from tests.session.training import VARIANTS
from tmd.protocol.control import TransportName

RUNS = int(os.environ.get("TMD_RANDOM_KILL_RUNS", "34"))
#: One run in four once more with gloo.
CASES = [("delta", seed) for seed in range(RUNS)] + [("gloo", seed) for seed in range(0, RUNS, 4)]
WORLD_SIZE = 4
#: The moments that some ranks do not pass: only those with a parent, or with children, in the vote's tree.
ROLES = {"vote.after_up": [1, 2, 3], "vote.child.0": [0, 1]}


@pytest.mark.parametrize(("transport", "seed"), CASES)
def test_three_ranks_die_at_random_moments_and_nothing_changes(
    transport: TransportName, seed: int, lab: Lab, kill: Killing
) -> None:
    dice = random.Random(seed)
    variant = dice.choice([variant for variant in VARIANTS if variant != ("noisy_tail",)])
    faults = []
    for step in (dice.randrange(5), dice.randrange(6, 11), dice.randrange(12, 17)):
        moment = dice.choice(MOMENTS if transport == "delta" else WITH_GLOO)
        rank = dice.choice(ROLES.get(moment, range(WORLD_SIZE)))
        faults += kill(moment, rank=rank, step=step, count=dice.randint(1, 2) if moment == "frame" else 1)
    reference = lab.reference(*variant, nodes=WORLD_SIZE, steps=18)
    with lab.cluster(*variant, nodes=WORLD_SIZE, standbys=3, steps=18, faults=faults) as cluster:
        assert cluster.run(120).exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 3, faults
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=3)
