"""With the ledger on a real Postgres: training does not notice that the daemon or the database goes away, and what has to be
decided meanwhile is decided once it is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon.postgres import Postgres
from tests.e2e.cluster import Cluster, Job, until
from tests.e2e.losses_rig import LongJob, wait_written


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, reference: Job, postgres: Postgres) -> Iterator[LongJob]:
    with Cluster(tmp_path_factory.mktemp("postgres"), nodes=5, database=postgres.fresh_database()) as cluster:
        yield LongJob(cluster, reference, standbys=1)


@pytest.fixture
def job(training: LongJob, postgres: Postgres) -> Job:
    """Whole and running, on a database that is there even if the last test has failed without it."""
    if not postgres.running:
        postgres.start()
    return training.whole()


def test_a_rank_is_moved_and_the_daemon_is_killed_and_started_again(training: LongJob, job: Job) -> None:
    move = job.request("--rank", "1")
    training.cluster.stack.kill()
    wait_written(job, 10)
    training.cluster.stack.start()
    until(lambda: job.migration(move)["ended_s"], f"{move} has ended")
    job.wait_progress()
    training.assert_unharmed()


def test_the_database_goes_away_while_a_rank_is_lost(training: LongJob, job: Job, postgres: Postgres) -> None:
    """
    1. Postgres is stopped as in a crash: no step stops.
    2. A rank is killed: the survivors hold, the daemon says that it cannot decide.
    3. Postgres is back: the rank is replaced.
    """
    postgres.stop()
    wait_written(job, 10)
    training.kill_rank(2)
    log = training.cluster.stack.log
    until(lambda: "the ledger cannot be written" in log.read_text(), "the daemon says that it cannot write")
    postgres.start()
    training.recovered(2)
