"""Agents over TCP: munge proves whose they are, and the job key comes back for that user's eyes alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec
import pytest

from tests.daemon.rig import Agent, Daemon
from tests.daemon.test_agents import free_port
from tests.munge.munged import ALICE, BOB, Munged, credential_of, python_as
from tmd.munge.library import MungeDown
from tmd.protocol.agent import AgentHello, AgentWelcome
from tmd.protocol.proofs import digest
from tmd_worker.agent.proof import MungeProof, UntrustedAnswer

READ_KEY = (
    "import sys; from tmd.munge.library import Munge; from tmd.munge.statements import read; "
    "from tmd.protocol.proofs import SealedKey; key, uid = read(Munge(sys.argv[1]), sys.argv[2], SealedKey); "
    "print(key.answers, key.job_key.hex(), uid)"
)


class Head:
    """A daemon that listens on TCP."""

    def __init__(self, make_daemon: Callable[..., Daemon], munged: Munged, tcp_auth: str = "auto") -> None:
        port = free_port()
        settings = {"TMD_MUNGE_SOCKET": munged.socket, "TMD_TCP_AUTH": tcp_auth}
        self.daemon = make_daemon("--listen", f"127.0.0.1:{port}").start(environ=settings)
        self.munged = munged
        self.url = f"http://127.0.0.1:{port}"
        self.agents: list[Agent] = []

    async def connect(
        self, uid: int, job_id: str = "j1", node: str = "n1", *, credential: str | None = None, token: str = ""
    ) -> Agent:
        """An agent with a credential of that user, unless another one is given."""
        fits = f"AgentProof(job_id={job_id!r}, agent_id={f'agent-{job_id}-{node}'!r}, node={node!r})"
        shown = credential_of(uid, self.munged, fits) if credential is None else credential
        self.agents.append(Agent(job_id, node, credential=shown, token=token))
        return await self.agents[-1].connect(self.daemon, url=self.url)

    async def leave(self) -> None:
        for agent in self.agents:
            await agent.leave()


MakeHead = Callable[..., Head]


@pytest.fixture
async def make_head(make_daemon: Callable[..., Daemon], munged: Munged) -> AsyncIterator[MakeHead]:
    made: list[Head] = []

    def make(*arguments: str) -> Head:
        made.append(Head(make_daemon, munged, *arguments))
        return made[-1]

    yield make
    for head in made:
        await head.leave()


async def test_the_users_own_agents_get_the_job_key_sealed(make_head: MakeHead, munged: Munged) -> None:
    head = make_head()
    keys = []
    for node in ("n1", "n2"):
        agent = await head.connect(ALICE, node=node)
        assert agent.welcome
        assert agent.welcome.job_key == b""
        answers, key, uid = python_as(ALICE, READ_KEY, munged.socket, agent.welcome.sealed_key).split()
        assert (answers, uid) == (digest(agent.hello.credential.encode()), "0")
        keys.append(bytes.fromhex(key))
    assert (keys[0] == keys[1], len(keys[0])) == (True, 32)
    assert head.daemon.client.get("/v1/jobs/j1")["record"]["owner_uid"] == ALICE


async def test_nobody_else_brings_agents_or_reads_the_key(make_head: MakeHead, munged: Munged) -> None:
    head = make_head()
    owner = await head.connect(ALICE)
    stranger = await head.connect(BOB, node="n2")
    assert f"belongs to uid {ALICE}, this agent runs as uid {BOB}" in stranger.refusal
    assert owner.welcome
    refused = python_as(
        BOB,
        "import sys; from tmd.munge.library import *\n"
        "try: Munge(sys.argv[1]).decode(sys.argv[2])\nexcept CredentialRefused as error: print(error.kind)",
        munged.socket,
        owner.welcome.sealed_key,
    )
    assert refused == "wrong uid"


async def test_a_credential_is_for_one_hello(make_head: MakeHead, munged: Munged) -> None:
    head = make_head()
    first = await head.connect(ALICE)
    again = await head.connect(ALICE, credential=first.hello.credential)
    assert "used before" in again.refusal
    for other in ("job_id='j2', agent_id='agent-j1-n1', node='n1'", "job_id='j1', agent_id='agent-j1-n2', node='n2'"):
        wrong = await head.connect(ALICE, credential=credential_of(ALICE, munged, f"AgentProof({other})"))
        assert "each hello needs its own" in wrong.refusal
    request = credential_of(ALICE, munged, "RequestProof(method='GET', target='/', body='')")
    assert "made for another purpose" in (await head.connect(ALICE, credential=request)).refusal
    assert "no munge credential" in (await head.connect(ALICE, credential="rubbish")).refusal


async def test_another_clusters_credential_is_refused_with_the_remedy(
    make_head: MakeHead, munged: Munged, make_munged: Callable[[], Munged]
) -> None:
    head = make_head()
    foreign = credential_of(ALICE, make_munged(), "AgentProof(job_id='j1', agent_id='agent-j1-n1', node='n1')")
    refusal = (await head.connect(ALICE, credential=foreign)).refusal
    assert "another munge key" in refusal
    assert "/etc/munge/munge.key" in refusal


async def test_while_munge_is_down_agents_are_asked_to_come_again(make_head: MakeHead, munged: Munged) -> None:
    head = make_head()
    token = head.daemon.client.post("/v1/jobs/j2/token")["token"]
    credential = credential_of(ALICE, munged, "AgentProof(job_id='j1', agent_id='agent-j1-n1', node='n1')")
    munged.kill()
    agent = await head.connect(ALICE, credential=credential)
    assert (agent.refusal, agent.closed) == ("", aiohttp.WSCloseCode.TRY_AGAIN_LATER)
    assert "systemctl start munge" in head.daemon.log_text()
    by_token = await head.connect(ALICE, "j2", credential="x", token=token)
    assert by_token.welcome, "a token that is shown as well is enough"
    assert (len(by_token.welcome.job_key), by_token.welcome.sealed_key) == (32, "")
    munged.start()
    assert (await head.connect(ALICE)).welcome


async def test_the_configuration_says_which_proofs_count(make_head: MakeHead, munged: Munged) -> None:
    strict = make_head("munge")
    token = strict.daemon.client.post("/v1/jobs/j1/token")["token"]
    assert "nothing else counts here" in (await strict.connect(ALICE, credential="", token=token)).refusal
    assert (await strict.connect(ALICE)).welcome
    lax = make_head("token")
    assert "munge credentials do not count here" in (await lax.connect(ALICE)).refusal
    token = lax.daemon.client.post("/v1/jobs/j1/token")["token"]
    assert (await lax.connect(ALICE, token=token)).welcome


# -------------------------------------------------------------------- the agent's own side


HELLO = AgentHello(
    protocol=(1, 2), tmd_version="0", job_id="j1", node="n1", agent_id="a1", host="127.0.0.1", nnodes=1, nproc_per_node=1
)
WELCOME = AgentWelcome(protocol=(1, 2), generation=1, heartbeat_s=1.0, hold_limit_s=1.0, job_key=b"")


def answer_of(uid: int, munged: Munged, hello: AgentHello, **changes: str) -> AgentWelcome:
    """A welcome whose key was sealed for this process by that user."""
    fields = {"job_id": "j1", "agent_id": "a1", "answers": digest(hello.credential.encode()), **changes}
    said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return msgspec.structs.replace(WELCOME, sealed_key=credential_of(uid, munged, f"SealedKey({said}, job_key=b'k')"))


async def test_an_agent_obeys_a_daemon_of_a_trusted_user_that_answers_its_own_hello(munged: Munged) -> None:
    proof = MungeProof(munged.munge, frozenset({0, BOB}))
    hello = await proof.attach(HELLO)
    for uid in (0, BOB):
        assert (await proof.opened(answer_of(uid, munged, hello), hello)).job_key == b"k"
    with pytest.raises(UntrustedAnswer, match=f"runs as uid {ALICE}.*--daemon-user"):
        await proof.opened(answer_of(ALICE, munged, hello), hello)
    later = await proof.attach(HELLO)
    assert later.credential != hello.credential
    with pytest.raises(UntrustedAnswer, match="another hello"):
        await proof.opened(answer_of(0, munged, hello), later)
    with pytest.raises(UntrustedAnswer, match="another hello"):
        await proof.opened(answer_of(0, munged, hello, job_id="j2"), hello)
    with pytest.raises(UntrustedAnswer, match="open for all to read"):
        await proof.opened(msgspec.structs.replace(WELCOME, job_key=b"k" * 32), hello)


async def test_a_token_takes_the_place_of_a_munged_that_is_down(munged: Munged) -> None:
    proof = MungeProof(munged.munge, frozenset({0}))
    munged.kill()
    with_token = msgspec.structs.replace(HELLO, token="t")
    assert await proof.attach(with_token) == with_token
    open_key = msgspec.structs.replace(WELCOME, job_key=b"k" * 32)
    assert await proof.opened(open_key, with_token) == open_key
    with pytest.raises(MungeDown, match="does not answer"):
        await proof.attach(HELLO)
