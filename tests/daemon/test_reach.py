"""A node whose ranks listen on a loopback address takes no part in a job with other machines; on one machine it does.

Needs root, for namespaces.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.rig import DEADLINE_S, Daemon, until
from tests.daemon.test_agents import free_port
from tests.munge.container import Network
from tmd.daemon.admission import NotAdmitted, Place, check_reach

HERE = Place("head", "127.0.1.1", "")
THERE = Place("n2", "10.0.0.2", "10.0.0.2")


@pytest.mark.parametrize(("newcomer", "known"), [(HERE, THERE), (THERE, HERE)])
def test_the_node_with_the_loopback_address_is_named_whoever_comes_first(newcomer: Place, known: Place) -> None:
    says = r"node head listen on 127.0.1.1, .* node n2 of the job is another machine: .*/etc/hosts.* tmd-run on head .*--host"
    with pytest.raises(NotAdmitted, match=says):
        check_reach(newcomer, [known, Place("n3", "10.0.0.3", "10.0.0.3")])


@pytest.mark.parametrize(
    ("newcomer", "known"),
    [
        (HERE, Place("n1", "127.0.0.11", "")),
        (HERE, Place("n1", "10.0.0.1", "")),  # the head's own address, on the same machine
        (HERE, Place("head", "10.0.0.1", "10.0.0.1")),  # the same node's earlier life
        (Place("a", "::1", "10.0.0.2"), Place("b", "127.0.0.1", "10.0.0.2")),
        (Place("head", "10.0.0.1", ""), THERE),
        (HERE, None),
    ],
)
def test_nodes_that_reach_each_other_are_taken(newcomer: Place, known: Place | None) -> None:
    check_reach(newcomer, [known] if known is not None else [])


def test_two_machines_may_not_both_listen_on_loopback() -> None:
    with pytest.raises(NotAdmitted, match=r"node n3 listen on 127.0.0.1"):
        check_reach(Place("n3", "127.0.0.1", "10.0.0.3"), [Place("n2", "127.0.0.1", "10.0.0.2")])


class Node:
    """A real tmd-run with an /etc/hosts of its own, in a network namespace or in that of this machine."""

    def __init__(self, name: str, hosts: str, url: str, folder: Path, network: Network | None = None) -> None:
        (folder / f"hosts-{name}").write_text(f"127.0.0.1 localhost\n{hosts}\n")
        self._log = folder / f"{name}.log"
        enter = ["ip", "netns", "exec", network.name] if network is not None else []
        shell = 'mount --bind "$0" /etc/hosts && exec "$@"'
        hiding = ["unshare", "--mount", "sh", "-c", shell, str(folder / f"hosts-{name}")]
        agent = [sys.executable, "-m", "tmd_worker.agent.main", "--daemon", url, "--job-id", "j1", "--node", name]
        rest = ["--nnodes", "2", "--nproc-per-node", "1", "--token-file", str(folder / "token"), str(folder / "train.py")]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*enter, *hiding, *agent, *rest], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
            )

    def refusal(self) -> str:
        """What it says once it has ended by itself."""
        assert self.process.wait(DEADLINE_S) != 0
        return self._log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(DEADLINE_S)


class Cluster:
    """A daemon, the node "head" on its machine, and "n2" on another one."""

    def __init__(self, daemon: Daemon, port: int, network: Network, folder: Path) -> None:
        self.daemon = daemon
        self._url = f"http://head.test:{port}"
        self._network = network
        self._folder = folder
        self.nodes: list[Node] = []
        (folder / "token").write_text(daemon.client.post("/v1/jobs/j1/token")["token"])
        (folder / "train.py").write_text("import time\ntime.sleep(600)\n")

    def start(self, name: str) -> Node:
        """Its tmd-run: on the head node the daemon's name is its own."""
        address, network = ("127.0.1.1", None) if name == "head" else (self._network.outside, self._network)
        self.nodes.append(Node(name, f"{address} head.test", self._url, self._folder, network))
        return self.nodes[-1]

    def agents(self) -> set[str]:
        jobs = self.daemon.client.get("/v1/jobs")["jobs"]
        return {node["node"] for node in self.daemon.client.get("/v1/jobs/j1")["nodes"]} if jobs else set()


@pytest.fixture
def cluster(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Cluster]:
    port = free_port()
    with Network() as network:
        cluster = Cluster(make_daemon("--listen", f"0.0.0.0:{port}").start(), port, network, tmp_path)
        yield cluster
        for node in cluster.nodes:
            node.end()


@pytest.mark.parametrize(("first", "second"), [("head", "n2"), ("n2", "head")])
async def test_tmd_run_ends_with_the_reason(cluster: Cluster, first: str, second: str) -> None:
    waiting = cluster.start(first)
    await until(lambda: first in cluster.agents(), f"the agent of {first}")
    refusal = await asyncio.to_thread(cluster.start(second).refusal)
    assert "the ranks of node head listen on 127.0.0.1, which nobody but its own machine reaches" in refusal
    assert "node n2 of the job is another machine" in refusal
    assert "--host or --interface, or correct /etc/hosts there" in refusal
    assert "Traceback" not in refusal
    assert waiting.process.poll() is None
    assert cluster.agents() == {first}
