"""What a script forgot to track is said before the first step, not after the first loss."""

from __future__ import annotations

from tests.session.conftest import Lab
from tests.session.harness import Cluster
from tests.session.outcome import Outcome


def logs(cluster: Cluster) -> list[str]:
    """By rank."""
    by_rank = {process.spec.rank: process.log.read_text() for process in cluster.processes()}
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_state_that_changes_ends_the_job_before_its_first_step(lab: Lab) -> None:
    with lab.cluster("scaler", "forgotten", nodes=2, steps=4) as cluster:
        over = cluster.run()
        assert over.exit_code == 1, cluster.report()
    assert "TrackRefused: the script changes state that session.track was not told of" in over.reason
    assert "tests/session/training.py:" in over.reason
    assert "session.track(scaler=scaler)" in over.reason
    assert Outcome.of(cluster.folder).losses == {}


def test_state_that_is_only_there_is_named_once_unless_it_is_excused(lab: Lab) -> None:
    with lab.cluster("idle", nodes=2, steps=3) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
    first, second = logs(cluster)
    assert "a Linear that was not tracked; it did not change" in first
    assert "was not tracked" not in second

    with lab.cluster("idle", "excused", nodes=2, steps=3) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
    assert "was not tracked" not in logs(cluster)[0]
