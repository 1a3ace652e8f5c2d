"""Slurm clusters that never outlive the tests; one that failed a test shows the ends of its logs."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT
from tests.slurm import plugins
from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options, installed_release
from tests.slurm.head import Head, opened_head
from tests.slurm.pool import RESERVATION, enrol, unreserve
from tests.slurm.report import Report
from tests.slurm.stack import STEPS, SlurmJob, SlurmStack


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


# -------------------------------------------------------------------- with tmd's plugins


@pytest.fixture(scope="session")
def plugin_folder() -> Iterator[Path]:
    """The plugins, built as `make plugins` does; every user may enter, as steps of theirs load them."""
    with tempfile.TemporaryDirectory(prefix="tmd-slurm-plugins-") as name:
        Path(name).chmod(0o755)
        plugins.make(f"BUILD={name}")
        yield Path(name)


@pytest.fixture(scope="session")
def events_path(plugin_folder: Path) -> Path:
    """Where slurmctld of `shared_standby_cluster` sends node events; nobody listens."""
    return plugin_folder / "events.sock"


@pytest.fixture(scope="session")
def shared_standby_cluster(plugin_folder: Path, events_path: Path) -> Iterator[SlurmCluster]:
    """Four nodes, the plugins loaded, and a second partition `small` that gives a job at most two nodes."""
    lines = "GresTypes=gpu\nPartitionName=small Nodes=ALL MaxNodes=2 State=UP"
    with plugins.events_go_to(events_path), SlurmCluster(plugins.loaded(plugin_folder, slurm_conf=lines)) as cluster:
        yield cluster


@pytest.fixture
def standby_cluster(shared_standby_cluster: SlurmCluster) -> SlurmCluster:
    """As it was in the beginning."""
    shared_standby_cluster.settle()
    return shared_standby_cluster


@pytest.fixture
def write_site_script(standby_cluster: SlurmCluster) -> Iterator[Callable[[str], None]]:
    """Writes job_submit.lua as a site might have it, and seconds younger than the last one: else slurmctld would not read it."""
    path = standby_cluster.places.etc / "job_submit.lua"
    before = path.read_text()
    ages = itertools.count(int(path.stat().st_mtime) + 2, 2)

    def write(text: str) -> None:
        path.write_text(text)
        age = next(ages)
        os.utime(path, (age, age))

    yield write
    write(before)


# -------------------------------------------------------------------- jobs under tmd


@pytest.fixture(scope="session")
def job_cluster(plugin_folder: Path) -> Iterator[SlurmCluster]:
    """Nodes for two jobs of four ranks with a standby each, and the plugins."""
    with plugins.events_go_to(plugin_folder / "hints.sock"), SlurmCluster(plugins.loaded(plugin_folder, nodes=10)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def job_stack(job_cluster: SlurmCluster, plugin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'worker'}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TMD_SLURM_HINT_SOCKET", str(plugin_folder / "hints.sock"))
        with SlurmStack(job_cluster, tmp_path_factory.mktemp("tmd")) as stack:
            yield stack


@pytest.fixture(scope="session")
def reference(job_stack: SlurmStack) -> SlurmJob:
    """An undisturbed run, whose losses and states all others must have, bit by bit."""
    job = job_stack.sbatch(steps=STEPS, pace_ms=0)
    job.wait_state("done")
    job.wait_gone()
    return job


@pytest.fixture
def stack(job_stack: SlurmStack, reference: SlurmJob) -> SlurmStack:
    """tmd and Slurm as they were in the beginning: no job, no drain, everything runs."""
    job_stack.settle()
    return job_stack


@pytest.fixture
def pool(stack: SlurmStack, job_cluster: SlurmCluster) -> Iterator[Callable[..., Head]]:
    """Starts a daemon that knows of the reservation, with further keys of [slurm]. It is neither root nor Slurm's user, and
    nothing is ended or given back but by its own rights or those of the jobs' user."""
    enrol(job_cluster)
    with contextlib.ExitStack() as opened:
        yield lambda **slurm: opened.enter_context(opened_head(job_cluster, standby_reservation=RESERVATION, **slurm))
    running = job_cluster.run("squeue", "-h", "-o", "%i").stdout.split()
    if running:
        job_cluster.run("scancel", *running, check=False)
    unreserve(job_cluster)


@pytest.fixture(scope="session")
def report() -> Report:
    return Report(installed_release(Options().prefix))
