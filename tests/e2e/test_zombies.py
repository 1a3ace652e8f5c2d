"""Processes that fall silent without dying: they are replaced, and when they wake nobody listens to them any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Job, marked, until
from tests.e2e.losses_rig import LongJob, continue_stopped, running_agents, wait_written

HEARTBEAT_TIMEOUT_S = 3.0
#: Exit code of an agent that was refused by the daemon.
EXIT_REFUSED = 3


@pytest.fixture(scope="module")
def freezing(tmp_path_factory: pytest.TempPathFactory, reference: Job) -> Iterator[LongJob]:
    core = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "report_timeout_s": 2.0, "install_timeout_s": 4.0}
    with Cluster(tmp_path_factory.mktemp("zombies"), nodes=6, core=core) as cluster:
        yield LongJob(cluster, reference)


@pytest.fixture
def job(freezing: LongJob) -> Job:
    """Whole and running, with two standbys ready."""
    return freezing.whole()


def agent_on(job: Job, node: str) -> dict[str, Any]:
    """The last life of an agent there."""
    return [agent for agent in job.agents() if agent["node"] == node][-1]


def assert_refused(job: Job, node: str, zombies: list[int]) -> None:
    """The agent has ended these processes and itself, and says why."""
    until(lambda: not set(zombies) & set(marked()), f"the zombies {zombies} are gone")
    until(lambda: not agent_on(job, node)["running"], f"the agent of {node} has ended")
    assert agent_on(job, node)["exit_code"] == EXIT_REFUSED
    log = (job.out / "logs" / f"{node}.log").read_text()
    assert f"node {node} was given up" in log
    assert "start tmd-run again to bring it back" in log


def test_a_frozen_node_is_replaced_and_refused_when_it_thaws(freezing: LongJob, job: Job) -> None:
    node, pid = job.node_of(1), job.pids()[1]
    freezing.kills[1] += 1
    freezing.cluster.ask("local", "freeze", node)
    record = freezing.recovered(1)
    assert record["from_nodes"] == [node]
    assert job.use_of(node)["use"] == "lost"
    freezing.cluster.ask("local", "thaw", node)
    assert_refused(job, node, [pid])
    job.wait_progress()
    freezing.assert_unharmed()
    freezing.cluster.reboot(node)
    until(lambda: node in {each["record"]["node"] for each in job.wait_ready(2)}, f"{node} is a standby again")


def test_a_frozen_rank_on_a_living_node_is_replaced_and_killed(freezing: LongJob, job: Job) -> None:
    pid = job.pids()[2]
    freezing.kills[2] += 1
    os.kill(pid, signal.SIGSTOP)
    freezing.recovered(2)
    until(lambda: pid not in marked(), "its agent has killed the frozen rank")


def test_a_frozen_agent_whose_ranks_commit_is_not_lost(freezing: LongJob, job: Job) -> None:
    """A rank whose votes commit is alive, whatever the heartbeats say."""
    before, epoch, agent = job.pids(), job.record()["epoch"], running_agents(job)[job.node_of(3)]
    os.kill(agent, signal.SIGSTOP)
    since_s = time.monotonic()
    try:
        until(lambda: time.monotonic() - since_s > 2 * HEARTBEAT_TIMEOUT_S, "every deadline on silence has passed", every_s=0.1)
        wait_written(job, 5)
    finally:
        continue_stopped(agent)
    job.wait_progress()
    freezing.assert_unharmed()
    assert (job.pids(), job.record()["epoch"]) == (before, epoch)


def test_a_rank_dies_unseen_under_a_frozen_agent(freezing: LongJob, job: Job) -> None:
    """Only its peers notice. The agent is refused when it wakes."""
    node = job.node_of(0)
    agent = running_agents(job)[node]
    os.kill(agent, signal.SIGSTOP)
    try:
        freezing.kill_rank(0)
        freezing.recovered(0)
    finally:
        continue_stopped(agent)
    assert_refused(job, node, [])
    job.wait_progress()
    freezing.assert_unharmed()


def test_a_standby_freezes_just_before_it_is_needed(freezing: LongJob, job: Job) -> None:
    """It may be chosen, since nobody knows yet: it does not link, and another one takes the role."""
    first = min(each["record"]["node"] for each in job.wait_ready(2))
    freezing.cluster.ask("local", "freeze", first)
    freezing.kill_rank(1)
    freezing.recovered(1)
    assert job.node_of(1) != first
    freezing.cluster.ask("local", "thaw", first)
    job.wait_progress()
    freezing.assert_unharmed()
