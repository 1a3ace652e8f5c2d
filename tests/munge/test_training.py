"""A real job of another user, over TCP by munge: its ranks find one another with the key that came sealed, and training needs
no munge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.rig import Daemon
from tests.daemon.test_agents import free_port
from tests.munge.munged import ALICE, Munged, as_user, environment

SCRIPT = Path(__file__).with_name("train_in_view.py")
DEADLINE_S = 120.0


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


class Node:
    """A `tmd-run` of alice's."""

    def __init__(self, name: str, folder: Path, url: str, munged: Munged, *options: str) -> None:
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "tmd_worker.agent", "--daemon", url, "--munge-socket", munged.socket, *options]
        command += ["--job-id", "j1", "--node", name, "--nnodes", "2", "--host", "127.0.0.1", str(SCRIPT), str(folder)]
        variables = environment(OMP_NUM_THREADS="1", TMD_NATIVE="0", HOME=str(folder))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                as_user(ALICE, *command), cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE_S)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    started: list[Node] = []
    yield started
    for node in started:
        node.end()


def test_training_goes_on_while_munge_is_down(
    make_daemon: Callable[..., Daemon], munged: Munged, nodes: list[Node], tmp_path: Path
) -> None:
    """
    1. Two agents of one user come by munge, their ranks begin to train.
    2. munged ends, and the daemon is killed and started again: no agent can prove itself to the new one.
    3. The ranks train to the end of what there is to train.
    4. munged is back: the agents are heard again, and the job is done.
    """
    port = free_port()
    settings = {"TMD_MUNGE_SOCKET": munged.socket, "TMD_TCP_AUTH": "munge"}
    daemon = make_daemon("--listen", f"127.0.0.1:{port}").start(environ=settings)
    nodes += [Node(name, tmp_path, f"http://127.0.0.1:{port}", munged, "--auth", "munge") for name in ("n1", "n2")]

    def told(what: str) -> None:
        files = [tmp_path / f"rank{rank}-{what}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files), lambda: f"{what}\n" + "\n".join(node.said for node in nodes))
        assert {file.read_text() for file in files} == {str(ALICE)}

    told("waits")
    munged.kill()
    daemon.end(signal.SIGKILL)
    daemon.start(environ=settings)
    for node in nodes:
        wait_until(lambda node=node: "munge does not work between this node and the daemon" in node.said, lambda: "a word of it")
    (tmp_path / "go-on").touch()
    told("trained")
    assert daemon.status()["agents"] == 0
    munged.start()
    for node in nodes:
        assert node.process.wait(DEADLINE_S) == 0, node.said
        assert "systemctl start munge" in node.said
    record = daemon.client.get("/v1/jobs/j1")["record"]
    assert (record["state"], record["owner_uid"], record["epoch"]) == ("done", ALICE, 0)


def test_who_cannot_prove_anything_is_told_what_to_do(
    make_daemon: Callable[..., Daemon], munged: Munged, nodes: list[Node], tmp_path: Path
) -> None:
    port = free_port()
    make_daemon("--listen", f"127.0.0.1:{port}").start(environ={"TMD_TCP_AUTH": "token"})
    url = f"http://127.0.0.1:{port}"
    nodes += [Node("n1", tmp_path, url, munged), Node("n2", tmp_path, url, munged, "--auth", "token")]
    assert nodes[0].process.wait(DEADLINE_S) == 3
    assert "tmctl job token j1" in nodes[0].said
    assert nodes[1].process.wait(DEADLINE_S) == 2
    assert "give --token-file" in nodes[1].said
