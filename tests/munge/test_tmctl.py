"""tmctl from another machine: munge says who asks, and who asks decides what may be done."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.daemon.rig import Agent, Daemon
from tests.daemon.test_agents import free_port
from tests.munge.munged import ALICE, BOB, Munged, credential_of, tmctl_as
from tmd.protocol.proofs import digest

OPERATOR, SLURM = 54103, 54104
JOBS = {"of-alice": ALICE, "of-bob": BOB}


class Head:
    """A daemon that listens on TCP, with one job of each user."""

    def __init__(self, daemon: Daemon, munged: Munged, port: int) -> None:
        self.daemon = daemon
        self.munged = munged
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def tmctl(self, uid: int, *arguments: str) -> tuple[int, str]:
        """Exit code, and what it printed."""
        done = tmctl_as(uid, self.munged, self.port, *arguments)
        return done.returncode, done.stdout + done.stderr

    def proof(self, uid: int, method: str, target: str, body: bytes = b"") -> str:
        return credential_of(uid, self.munged, f"RequestProof(method={method!r}, target={target!r}, body={digest(body)!r})")

    def ask(self, credential: str, method: str, target: str, body: bytes = b"") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, target, body, {"Authorization": f"Munge {credential}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


@pytest.fixture
async def head(
    make_daemon: Callable[..., Daemon], munged: Munged, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Head]:
    slurm_conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    slurm_conf.write_text(f"ClusterName=c\nSlurmUser={SLURM} # the controller's\n")
    port = free_port()
    settings = {"TMD_MUNGE_SOCKET": munged.socket, "TMD_OPERATORS": str(OPERATOR), "SLURM_CONF": str(slurm_conf)}
    head = Head(make_daemon("--listen", f"127.0.0.1:{port}").start(environ=settings), munged, port)
    agents = []
    for job_id, uid in JOBS.items():
        agent = Agent(job_id)
        statement = f"AgentProof(job_id={job_id!r}, agent_id={agent.hello.agent_id!r}, node='n1')"
        agents.append(Agent(job_id, credential=credential_of(uid, munged, statement)))
        assert (await agents[-1].connect(head.daemon, url=head.url)).welcome
    yield head
    for agent in agents:
        await agent.leave()


def test_a_user_acts_on_own_jobs_and_on_nothing_else(head: Head) -> None:
    assert json.loads(head.tmctl(ALICE, "jobs", "--json")[1])["jobs"][0]["record"]["owner_uid"] == ALICE
    for uid, own, other in ((ALICE, "of-alice", "of-bob"), (BOB, "of-bob", "of-alice")):
        code, listed = head.tmctl(uid, "jobs")
        assert (code, own in listed, other in listed) == (0, True, False)
    for arguments in (("job", "show"), ("job", "cancel"), ("job", "token"), ("migrate", "--rank", "0")):
        code, said = head.tmctl(BOB, *arguments, "of-alice")
        assert (code, "not yours" in said) == (1, True), said
    for arguments in (("drain", "n1", "--reason", "x"), ("resume", "n1"), ("pause",)):
        code, said = head.tmctl(ALICE, *arguments)
        assert (code, "is for operators" in said) == (1, True), said
    code, said = head.tmctl(ALICE, "job", "cancel", "of-alice")
    assert (code, "cancelled by uid 54101" in said) == (0, True), said


@pytest.mark.parametrize("uid", [0, OPERATOR, SLURM])
def test_root_operators_and_slurms_user_may_do_all(head: Head, uid: int) -> None:
    code, listed = head.tmctl(uid, "jobs")
    assert (code, *(job_id in listed for job_id in JOBS)) == (0, True, True)
    assert head.tmctl(uid, "drain", "n1", "--reason", "fan")[0] == 0
    assert head.tmctl(uid, "resume", "n1")[0] == 0
    assert head.tmctl(uid, "job", "cancel", "of-bob")[0] == 0


def test_a_credential_counts_once_and_for_its_own_request(head: Head) -> None:
    target = "/v1/jobs/of-alice/cancel"
    for changed in (
        ("GET", target, b"{}"),
        ("POST", "/v1/jobs/of-alice/token", b"{}"),
        ("POST", target + "?x", b"{}"),
        ("POST", target, b"{ }"),
    ):
        status, answer = head.ask(head.proof(ALICE, "POST", target, b"{}"), *changed)
        assert (status, "not for" in answer["error"]) == (403, True), changed
    credential = head.proof(ALICE, "GET", "/v1/jobs")
    assert head.ask(credential, "GET", "/v1/jobs")[0] == 200
    status, answer = head.ask(credential, "GET", "/v1/jobs")
    assert (status, "used before" in answer["error"]) == (403, True)
    of_agent = credential_of(ALICE, head.munged, "AgentProof(job_id='of-alice', agent_id='a', node='n1')")
    status, answer = head.ask(of_agent, "GET", "/v1/jobs")
    assert (status, "another purpose" in answer["error"]) == (403, True)
    assert head.daemon.client.get("/v1/jobs/of-alice")["record"]["state"] != "failed", "nothing was cancelled by any of these"


def test_what_another_cluster_made_is_refused_with_the_remedy(head: Head, make_munged: Callable[[], Munged]) -> None:
    code, said = Head(head.daemon, make_munged(), head.port).tmctl(ALICE, "jobs")
    assert (code, "another munge key" in said, "/etc/munge/munge.key" in said) == (1, True, True), said


def test_without_munge_nobody_is_known_and_the_fault_is_named(head: Head, make_munged: Callable[[], Munged]) -> None:
    credential = head.proof(ALICE, "GET", "/v1/jobs")
    head.munged.kill()
    code, said = head.tmctl(ALICE, "jobs")
    assert (code, "nothing was asked" in said, "systemctl start munge" in said) == (2, True, True), said
    status, answer = head.ask(credential, "GET", "/v1/jobs")
    assert (status, "on the head node" in answer["error"], bool(answer["remedy"])) == (503, True, True)
    assert len(head.daemon.client.get("/v1/jobs")["jobs"]) == len(JOBS), "the unix socket needs no munge"
    head.munged.start()
    assert head.tmctl(ALICE, "jobs")[0] == 0


def test_local_nodes_are_not_steered_from_afar(head: Head) -> None:
    code, said = head.tmctl(0, "local", "kill", "n1")
    assert (code, "the daemon's own machine" in said) == (1, True), said


def test_an_address_that_is_none_is_a_mistake_of_usage(head: Head) -> None:
    for address in ("head", "https://head:1", "http://head", "http://head:port", "ftp://head:1"):
        done = tmctl_as(ALICE, head.munged, head.port, "--daemon", address, "jobs")
        assert (done.returncode, "is no daemon's address" in done.stderr) == (2, True), done.stderr
    both = tmctl_as(ALICE, head.munged, head.port, "--socket", "/s", "jobs")
    assert (both.returncode, "give one of them" in both.stderr) == (2, True)
