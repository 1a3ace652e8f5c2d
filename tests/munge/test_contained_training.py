"""Training in containers without munge: tokens prove the owner, ranks in different containers find one another, lost ones are
replaced by standbys inside and outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.rig import Daemon
from tests.daemon.test_agents import free_port
from tests.munge.container import Container, Network, shared_memory
from tests.munge.munged import ROOT, Munged, environment
from tmd.cli.client import ClientError

TRAIN = ROOT / "tests/e2e/train_small.py"
RUN = [sys.executable, "-m", "tmd_worker.agent"]
STEPS = 60
#: While a test acts on the job, and while it waits for processes that import PyTorch: the steps must not run out.
PACE_MS, SLOW_PACE_MS = 250, 3000
DEADLINE_S = 240.0


def until(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    """What the condition gives as soon as that is true. A disk that is busy for too long only costs a look."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            value = condition()
        except ClientError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


class Job:
    """Two ranks of the training script of tests/e2e, and who stands by."""

    def __init__(self, job_id: str, daemon: Daemon, address: str, port: int, folder: Path, munged: Munged) -> None:
        self.id = job_id
        self.out = folder / job_id
        self.out.mkdir()
        self._daemon, self._address, self._munged = daemon, address, munged
        self._options = ["--daemon", f"http://{address}:{port}", "--job-id", job_id, "--nnodes", "2"]
        self.containers: dict[str, Container] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def command(self, node: str, token: Path, host: str) -> list[str]:
        place = ["--token-file", str(token), "--auth", "auto", "--node", node, "--host", host]
        return [*RUN, *self._options, *place, str(TRAIN), "--out", str(self.out), "--steps", str(STEPS)]

    def token(self) -> Path:
        file = self.out / "token"
        if not file.exists():
            file.write_text(self._daemon.client.post(f"/v1/jobs/{self.id}/token")["token"])
        return file

    def add_container(self, node: str, *, own_user: bool = False, network: Network | None = None) -> Container:
        command = self.command(node, self.token(), network.inside if network is not None else self._address)
        log, munged_folder = self.out / f"{node}.log", self._munged.folder
        made = Container(command, munged_folder=munged_folder, log=log, own_user=own_user, network=network)
        self.containers[node] = made
        return made

    def add_node(self, node: str) -> None:
        """On this machine, outside of all containers."""
        with (self.out / f"{node}.log").open("wb") as log:
            command = self.command(node, self.token(), self._address)
            variables = environment(OMP_NUM_THREADS="1", HOME=str(Path.home()))
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=variables))

    def set_pace(self, pace_ms: int) -> None:
        (self.out / "pace").write_text(str(pace_ms))

    def view(self) -> Any:
        """An empty one until the first agent has made the job known."""
        known = self._daemon.client.get("/v1/jobs")["jobs"]
        if self.id not in [each["record"]["job_id"] for each in known]:
            return {"record": {"state": "unknown"}, "ranks": [], "standbys": [], "next_step": 0}
        return self._daemon.client.get(f"/v1/jobs/{self.id}")

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')}" for path in sorted(self.out.glob("*.log")))

    def wait_ready(self, node: str) -> None:
        """The standby of this node can take a role, and the job commits steps."""

        def ready() -> bool:
            view = self.view()
            records = [each["record"] for each in view["standbys"] if each["sentence"] == "ready"]
            return (
                (node, "standby") in [(each["node"], each["state"]) for each in records]
                and view["next_step"] > 3
                and self.running()
            )

        self.set_pace(SLOW_PACE_MS)
        until(ready, lambda: f"{self.view()}\n{self.logs()}")
        self.set_pace(PACE_MS)

    def wait_formed(self) -> None:
        """Who has come so far trains, whoever comes later stands by."""
        until(lambda: len(self.view()["ranks"]) == 2, self.logs)

    def wait_moved(self, rank: int, node: str) -> None:
        """This rank trains on this node, and steps are committed."""
        until(lambda: self.node_of(rank) == node and self.running(), lambda: f"{self.view()}\n{self.logs()}")
        step = self.view()["next_step"] + 3
        until(lambda: self.view()["next_step"] >= step, lambda: f"{self.view()}\n{self.logs()}")

    def running(self) -> bool:
        return bool(self.view()["record"]["state"] == "running")

    def node_of(self, rank: int) -> str:
        """Empty while nobody has the role."""
        return next((each["record"]["node"] for each in self.view()["ranks"] if each["record"]["rank"] == rank), "")

    def pid(self, node: str) -> int:
        """Of the one process on this node, as the node's agent reports it."""
        return int(next(each["pid"] for each in self.view()["ranks"] if each["record"]["node"] == node))

    def finish(self) -> dict[tuple[int, int], dict[str, Any]]:
        """(rank, step) -> its line but for the pid, once the job is done."""
        self.set_pace(0)
        until(lambda: self.view()["record"]["state"] in ("done", "failed"), lambda: f"{self.view()}\n{self.logs()}")
        assert self.view()["record"]["state"] == "done", self.logs()
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in (0, 1):
            for line in (self.out / f"steps-rank{rank}.jsonl").read_text().splitlines():
                row = json.loads(line)
                del row["pid"]
                assert found.setdefault((rank, row["step"]), row) == row, f"rank {rank}, step {row['step']} has two results"
        return found

    def end(self) -> None:
        for container in self.containers.values():
            container.kill()
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture
def make_job(
    make_daemon: Callable[..., Daemon], munged: Munged, network: Network, tmp_path: Path
) -> Iterator[Callable[[str], Job]]:
    port = free_port()
    daemon = make_daemon("--listen", f"{network.outside}:{port}").start(environ={"TMD_MUNGE_SOCKET": munged.socket})
    jobs: list[Job] = []

    def make(job_id: str) -> Job:
        jobs.append(Job(job_id, daemon, network.outside, port, tmp_path, munged))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_ranks_in_containers_are_replaced_bit_for_bit(make_job: Callable[[str], Job], network: Network) -> None:
    """
    1. Two ranks train, each in a container; the second has a user namespace of its own. A standby waits outside, another one in
       a container with a network of its own.
    2. The rank of the second container is killed, by the pid that its agent reports: one of the standbys takes its role.
    3. The second container vanishes as a whole, then the first one: the other standby takes its role.
    4. Every loss and the final state are those of a run outside of containers in which nothing happened.
    """
    undisturbed = make_job("undisturbed")
    for node in ("n1", "n2"):
        undisturbed.add_node(node)
    expected = undisturbed.finish()

    job = make_job("contained")
    job.set_pace(SLOW_PACE_MS)
    first, second = job.add_container("n1"), job.add_container("n2", own_user=True)
    job.wait_formed()
    job.add_node("n3")
    job.wait_ready("n3")
    ranks = {node: job.containers[node].pid_outside(job.pid(node)) for node in ("n1", "n2")}
    assert set(map(job.pid, ("n1", "n2"))).isdisjoint(ranks.values()), "the agents report the containers' own pids"
    assert shared_memory(ranks["n1"]) & shared_memory(ranks["n2"]), "their link needs no common /dev/shm"

    lost = next(each for each in (0, 1) if job.node_of(each) == "n2")
    command = ["nsenter", "--target", str(second.first().pid), "--pid", "--", "kill", "-KILL", str(job.pid("n2"))]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    job.wait_moved(lost, "n3")
    assert shared_memory(ranks["n1"]) & shared_memory(job.pid("n3")), "in and out of a container as well"

    second.kill()  # with the standby that took the killed rank's place there
    far = job.add_container("n4", network=network)
    job.wait_ready("n4")
    first.kill()
    job.wait_moved(1 - lost, "n4")
    assert not shared_memory(far.pid_outside(job.pid("n4"))), "from another network to here is as from another host"

    assert job.finish() == expected
    assert far.end() == 0, far.said
