"""A daemon whose ledger was lost or replaced has no say in what runs: its words are not obeyed, the ranks train on."""

from __future__ import annotations

import pytest

from tests.agent.agent_rig import KEY, Agent, Rig, StandInDaemon, spec, until
from tmd.protocol.agent import AgentDirective, JobOver
from tmd.protocol.keys import fingerprint

#: What the stranger wants: only a process of its own, the end of the job.
ITS_OWN = AgentDirective(generation=99, sequence=1, processes=(spec("other"),))
THE_END = AgentDirective(generation=99, sequence=1, job_over=JobOver(exit_code=1, reason="a stranger says so"))


@pytest.fixture
async def agent(rig: Rig, daemon: StandInDaemon) -> Agent:
    """One rank runs, under the third life of the daemon."""
    daemon.generation = 3
    made = await rig.directed(daemon)
    await daemon.direct(spec("i-a", 0))
    await daemon.state("i-a", "running")
    return made


async def assert_unharmed(agent: Agent, daemon: StandInDaemon, told: str) -> None:
    """The stranger has come and gone more than once; then the job's own daemon is back and finds the rank as it left it."""
    await until("the agent comes again", lambda: len(daemon.hellos) > 1)
    assert daemon.statuses == [], "the stranger was told something"
    assert agent.err.count("is not this job's") == 1
    assert told in agent.err
    assert {(hello.key_fingerprint, hello.generation) for hello in daemon.hellos} == {(fingerprint(KEY), 3)}
    (pid,) = (pid for pid in agent.session() if pid != agent.process.pid)
    daemon.key, daemon.refuse, daemon.at_once, daemon.generation = KEY, "", None, 3
    await daemon.restart()
    assert (await daemon.state("i-a", "running")).pid == pid


@pytest.mark.parametrize("wish", [ITS_OWN, THE_END], ids=["its own", "the end"])
async def test_a_welcome_with_another_key_is_not_believed(wish: AgentDirective, agent: Agent, daemon: StandInDaemon) -> None:
    daemon.key, daemon.at_once = b"x" * 32, wish
    await daemon.restart()
    await assert_unharmed(agent, daemon, "its ledger has another key for the job")


async def test_a_welcome_by_an_older_life_of_the_daemon_is_not_believed(agent: Agent, daemon: StandInDaemon) -> None:
    """A backup was put in the ledger's place."""
    daemon.at_once = ITS_OWN
    daemon.generation = 0  # restart makes it 1
    await daemon.restart()
    await assert_unharmed(agent, daemon, "its ledger is an older one (life 1 of the daemon; here life 3 is known)")


async def test_a_refusal_without_the_jobs_key_is_not_believed(agent: Agent, daemon: StandInDaemon) -> None:
    """An emptied state directory has neither the job nor the secret that tokens are made with."""
    daemon.key, daemon.refuse = None, "it has no token"
    await daemon.restart()
    await assert_unharmed(agent, daemon, "its ledger does not know the job's key")


async def test_a_refusal_by_the_jobs_own_daemon_ends_agent_and_ranks(agent: Agent, daemon: StandInDaemon) -> None:
    daemon.refuse = "node n1 was given up"
    await daemon.restart()
    assert await agent.ended() == 3
    assert "node n1 was given up" in agent.err


async def test_an_agent_that_has_started_nothing_takes_whichever_daemon_there_is(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon)
    assert (await daemon.connected()).key_fingerprint == ""
    await until("a status", lambda: daemon.statuses)
    daemon.key = b"x" * 32
    await daemon.restart()
    await daemon.direct(spec("i-a", 0))
    await daemon.state("i-a", "running")
