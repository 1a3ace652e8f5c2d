"""One cluster for the whole session, one undisturbed run to compare with, and nothing left behind."""

from __future__ import annotations

import functools
import os
import secrets
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster import MARK, ROOT, Cluster, Job, kill_marked
from tmd.protocol.control import TransportName

#: More steps than any job that is compared with the reference may take. Where processes outnumber processors, gloo needs ten
#: times as long for one.
REFERENCE_STEPS = 1500
GLOO_REFERENCE_STEPS = 120
REFERENCE_TIMEOUT_S = 300.0
#: Four train, the others stand by.
NODES = 8


@pytest.fixture(scope="session", autouse=True)
def clean_machine() -> Iterator[None]:
    """Processes find the packages as if these were installed; whatever outlives the tests is killed and counts as a failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'worker'}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(MARK, secrets.token_hex(8))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        finally:
            left = kill_marked()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("e2e"), nodes=NODES) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def references(cluster: Cluster) -> Callable[[TransportName], Job]:
    """An undisturbed run with each transport, made when it is first asked for."""

    @functools.cache
    def undisturbed(transport: TransportName) -> Job:
        steps = REFERENCE_STEPS if transport == "delta" else GLOO_REFERENCE_STEPS
        job = cluster.start_job(steps=steps, pace_ms=0, transport=transport)
        job.wait_state("done", within_s=REFERENCE_TIMEOUT_S)
        job.wait_gone()
        return job

    return undisturbed


@pytest.fixture(scope="module")
def transport() -> TransportName:
    """What carries the collectives of a module's jobs; MODULE_ON_BOTH lets a module run once with each."""
    return "delta"


@pytest.fixture(scope="module")
def reference(references: Callable[[TransportName], Job], transport: TransportName) -> Job:
    """An undisturbed run."""
    return references(transport)
