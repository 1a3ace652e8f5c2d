"""Runs of real processes under the real DaemonCore: whatever happens, losses and final state are those of a quiet run."""

from __future__ import annotations

from pathlib import Path

from tests.session.harness import Cluster


def test_an_undisturbed_run_ends_by_itself(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, arguments=("6", "batchnorm")) as cluster:
        over = cluster.run()
        assert over.exit_code == 0, cluster.report()
        losses = cluster.losses()
    assert sorted(losses) == [0, 1]
    assert all(sorted(mine) == list(range(6)) for mine in losses.values())
