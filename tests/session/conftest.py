"""One zygote for all tests of real rank processes, and the quiet runs that the disturbed ones are compared with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.session.harness import Cluster
from tests.session.outcome import Outcome
from tests.session.zygote import Zygote
from tests.transports import TRANSPORTS
from tmd.protocol.control import TransportName


class Lab:
    """Runs the training script on clusters of any shape, whose collectives one transport carries."""

    def __init__(self, zygote: Zygote, folder: Path, transport: TransportName) -> None:
        self._zygote = zygote
        self._folder = folder
        self._transport = transport
        self._numbers = itertools.count()
        self._references: dict[Any, Outcome] = {}

    def cluster(
        self, *variants: str, steps: int = 8, gate: int = -1, faults: list[dict[str, Any]] | None = None, **shape: Any
    ) -> Cluster:
        """`gate`: the step that waits for Cluster.open_gate; `faults`: see tmd_worker.faults; `shape`: nodes, per_node,
        standbys; another script; settings of the daemon's core."""
        folder = self._folder / f"run{next(self._numbers)}"
        (folder / "faults").mkdir(parents=True)
        environment = {
            "TMD_FAULTS_DIR": str(folder / "faults"),
            "TMD_FAULTS": json.dumps(faults or []),
            "TMD_TEST_GATE": str(gate),
        }
        arguments = (str(steps), *variants)
        return Cluster(folder, self._zygote, arguments=arguments, environment=environment, transport=self._transport, **shape)

    def reference(self, *variants: str, steps: int = 8, nodes: int = 2, per_node: int = 1) -> Outcome:
        """The outcome of the run that nothing disturbs."""
        key = (variants, steps, nodes, per_node)
        if key not in self._references:
            with self.cluster(*variants, steps=steps, nodes=nodes, per_node=per_node) as cluster:
                over = cluster.run()
                assert over.exit_code == 0, cluster.report()
            self._references[key] = Outcome.of(cluster.folder)
        return self._references[key]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


@pytest.fixture(scope="session")
def labs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[TransportName, Lab]:
    return {transport: Lab(zygote, tmp_path_factory.mktemp(transport), transport) for transport in TRANSPORTS}


@pytest.fixture
def transport() -> TransportName:
    """What carries the collectives of the test's clusters; @BOTH lets a test run once with each."""
    return "delta"


@pytest.fixture
def lab(labs: dict[TransportName, Lab], transport: TransportName) -> Lab:
    return labs[transport]


Killing = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def kill() -> Killing:
    """A SIGKILL that a rank gives itself at a named point of the code."""

    def one(point: str, *, rank: int, step: int | None = None, count: int = 1) -> list[dict[str, Any]]:
        fault = {"point": point, "rank": rank, "action": "kill", "count": count}
        return [fault if step is None else {**fault, "step": step}]

    return one
