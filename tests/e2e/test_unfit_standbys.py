"""Standby nodes that differ from the job in something that decides results: each is refused with that named, training goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tmd
from tests.e2e.cluster import TRAIN, Cluster, HandAgent, Job, assert_unharmed, until

EXIT_REFUSED = 3


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(TRAIN, tmp_path_factory.mktemp("script")))


@pytest.fixture(scope="module")
def job(cluster: Cluster, reference: Job, script: Path) -> Iterator[Job]:
    """Four ranks and no standby of its own."""
    job = cluster.start_job(steps=1500, pace_ms=60, script=script)
    until(lambda: job.view()["next_step"] > 3, f"{job.id} trains")
    yield job
    job.end()


@pytest.fixture
def standby(cluster: Cluster, job: Job, script: Path) -> Iterator[Callable[..., HandAgent]]:
    """Starts agents by hand; the job's processes and epoch stay what they are."""
    agents: list[HandAgent] = []

    def start(node: str, **env: str) -> HandAgent:
        agents.append(cluster.start_agent(job, node, script=script, env=env))
        return agents[-1]

    before = job.pids()
    yield start
    for agent in agents:
        agent.kill()
    job.wait_progress()
    assert job.pids() == before


def refusal(job: Job, agent: HandAgent, node: str) -> str:
    """What the agent says before it ends; the job's log has it, too, and no standby came of it."""
    assert agent.end() == EXIT_REFUSED, agent.output()
    (event,) = [event for event in job.story(node) if event["kind"] == "refused"]
    assert event["text"] in agent.output()
    assert job.view()["standbys"] == []
    return agent.output()


def test_a_script_with_another_content(job: Job, script: Path, standby: Callable[..., HandAgent]) -> None:
    whole = script.read_text()
    script.write_text(whole + "# changed on this node only\n")
    agent = standby("hand1")
    said = refusal(job, agent, "hand1")
    script.write_text(whole)
    assert f"node hand1 cannot take part in job {job.id}: its script has digest" in said
    assert "the file differs between the nodes" in said


def test_another_transport(job: Job, standby: Callable[..., HandAgent]) -> None:
    agent = standby("hand0", TMD_TRANSPORT="gloo")
    assert "transport is gloo there and delta" in refusal(job, agent, "hand0")


def test_another_tmd(job: Job, standby: Callable[..., HandAgent], tmp_path: Path) -> None:
    """The order of summation is tmd's own, so another release may yield other bits."""
    (tmp_path / "sitecustomize.py").write_text("import tmd\n\ntmd.__version__ = '0.0.9'\n")
    agent = standby("hand9", PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert f"tmd is 0.0.9 there and {tmd.__version__} on the job's first node" in refusal(job, agent, "hand9")


def test_another_torch(job: Job, standby: Callable[..., HandAgent], tmp_path: Path) -> None:
    metadata = tmp_path / "torch-1.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    agent = standby("hand2", PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert "torch is 1.0.0 there and" in refusal(job, agent, "hand2")


def test_another_cpu_capability(job: Job, standby: Callable[..., HandAgent]) -> None:
    said = refusal(job, standby("hand3", ATEN_CPU_CAPABILITY="default"), "hand3")
    assert "cpu_capability is" in said
    assert "ATEN_CPU_CAPABILITY=default there" in said


def test_another_number_of_threads(job: Job, standby: Callable[..., HandAgent]) -> None:
    said = refusal(job, standby("hand4", OMP_NUM_THREADS="2"), "hand4")
    assert "OMP_NUM_THREADS is 2 there and 1 on the job's first node" in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("extra", "buffer model/surplus float32[3] only here"),
        ("wider", "appears not to match sizes of the same param in process 0"),
    ],
)
def test_a_standby_that_builds_another_model_never_becomes_ready(
    cluster: Cluster, job: Job, reference: Job, standby: Callable[..., HandAgent], model: str, said: str
) -> None:
    """Nothing that can be compared beforehand differs: the environment of this node makes `main` build something else."""
    node = f"hand-{model}"
    agent = standby(node, E2E_MODEL=model)
    until(lambda: said in job.node_sentence(node), f"{node} says why it is of no use", every_s=0.2)
    assert "1 standby needed, 0 usable" in cluster.refusal("migrate", job.id, "--rank", "1")
    assert said in agent.output()
    job.wait_progress()
    assert_unharmed(job, reference)
