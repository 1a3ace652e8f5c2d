"""Many kills of random ranks at random moments of a step, one after the other, on jobs that get their standbys back.

TMD_KILLS sets how many (each costs the start of a process, two to three seconds of one core); TMD_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import WORLD_SIZE, Cluster, Job
from tests.e2e.losses_rig import LongJob

KILLS = int(os.environ.get("TMD_KILLS", "20"))
SEED = int(os.environ.get("TMD_SEED", "1"))
STANDBYS = 4
#: A pair of victims falls within this time: the second one during the first one's recovery, or before it is noticed.
PAIR_S = 0.08
#: Longer than a step, so that the moment may be any.
ANY_MOMENT_S = 0.04


@pytest.fixture
def killing(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    with Cluster(tmp_path_factory.mktemp("kills"), nodes=WORLD_SIZE + STANDBYS) as cluster:
        yield LongJob(cluster, reference, standbys=1, spares=STANDBYS)


def victims(chance: random.Random) -> list[int]:
    """One rank or, at times, two that are not buddies."""
    first = chance.randrange(WORLD_SIZE)
    return [first, (first + 2) % WORLD_SIZE] if chance.random() < 0.3 else [first]


def test_every_kill_leaves_the_results_as_they_were(killing: LongJob) -> None:
    chance, done = random.Random(SEED), 0
    while done < KILLS:
        job, ranks = killing.whole(), victims(chance)
        job.set_pace(0)
        for number, rank in enumerate(ranks):
            time.sleep(chance.random() * (PAIR_S if number else ANY_MOMENT_S))
            killing.kill_rank(rank)
        killing.replaced(*ranks)
        done += len(ranks)
    killing.finish()
    killing.assert_unharmed()
