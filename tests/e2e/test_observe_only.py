"""A daemon that only observes: it says what it would do and leaves everything as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, Job, until


@pytest.fixture(scope="module")
def observer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("observer"), nodes=3, core={"observe_only": True}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(observer: Cluster) -> Iterator[Job]:
    job = observer.start_job(nnodes=2, standby=1, steps=10_000)
    job.wait_ready(1)
    yield job
    job.end()


def test_a_request_is_refused_and_a_drain_moves_nothing(observer: Cluster, job: Job) -> None:
    before = job.pids()
    assert "tmd only observes (observe_only is set)" in observer.refusal("migrate", job.id, "--rank", "0")
    observer.ask("drain", "n1", "--reason", "fan 2 is slow")
    until(lambda: "tmd only observes, so its ranks stay" in job.node_sentence("n1"), "n1 says why its ranks stay")
    would = until(lambda: [event["text"] for event in job.story("n1") if event["kind"] == "notice"], "it says what it would do")
    assert len(would) == 1
    assert "it would move rank 0" in would[0]
    job.wait_progress()
    assert job.pids() == before
    assert job.migrations() == []
    assert "observe" in observer.tmctl("status").output
