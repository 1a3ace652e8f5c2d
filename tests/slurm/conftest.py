"""Slurm clusters that never outlive the tests; one that failed a test shows the ends of its logs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SlurmCluster]:
    """Four nodes, nothing loaded."""
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: SlurmCluster) -> SlurmCluster:
    """The shared cluster as it was in the beginning: no job, no drain, every part runs."""
    shared_cluster.settle()
    return shared_cluster


@pytest.fixture
def make_cluster() -> Iterator[Callable[[Options], SlurmCluster]]:
    """For tests that need plugins or other settings: a cluster of their own."""
    made: list[SlurmCluster] = []

    def make(options: Options) -> SlurmCluster:
        made.append(SlurmCluster(options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """An empty folder that every user may enter, unlike tmp_path: for plugins and programs that jobs' users must reach."""
    with tempfile.TemporaryDirectory(prefix="tmd-slurm-public-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, SlurmCluster) and value.folder.exists():
                report.sections.append((f"logs of {name}", value.logs()))
    return report
