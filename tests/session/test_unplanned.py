"""A rank is lost at a chosen moment; a standby takes its place and the run ends as if nothing had happened."""

from __future__ import annotations

import time

import pytest

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome
from tests.transports import BOTH
from tmd.core.settings import CoreSettings
from tmd.protocol.exits import EXIT_THREAD

#: From the first line of a step to its last, in the order in which a rank passes them.
MOMENTS = [
    "boundary",
    "step.begin",
    "forward",
    "backward",
    "frame",
    "record.sent",
    "record.held",
    "vote.recorded",
    "vote.begin",
    "vote.after_up",
    "vote.decided",
    "vote.child.0",
    "optimizer.begin",
    "optimizer.end",
    "tail",
]
#: Of these, the ones at which the inner group of another library is in some other state than at their neighbours.
WITH_GLOO = [
    *("boundary", "step.begin", "forward", "backward", "vote.begin", "vote.after_up", "vote.decided"),
    *("optimizer.begin", "optimizer.end", "tail"),
]
#: As the daemon's core names processes: in order, by node.
FIRST_STANDBY_OF_3 = "job.4"


@pytest.mark.parametrize(
    ("transport", "moment"), [*(("delta", moment) for moment in MOMENTS), *(("gloo", moment) for moment in WITH_GLOO)]
)
def test_a_rank_killed_at_any_moment_of_a_step_is_replaced_bit_for_bit(moment: str, lab: Lab, kill: Killing) -> None:
    rank = 2 if moment == "vote.after_up" else 1
    reference = lab.reference("batchnorm", nodes=4)
    with lab.cluster("batchnorm", nodes=4, standbys=1, faults=kill(moment, rank=rank, step=3)) as cluster:
        over = cluster.run()
        assert over.exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("vote.begin", 0),
        ("vote.ballot.0", 0),
        ("vote.ballot.1", 0),
        ("vote.ballot.0", 1),
        ("vote.decided", 0),
        ("vote.child.0", 0),
        ("vote.child.1", 0),
        ("vote.after_up", 1),
        ("vote.decided", 1),
        ("vote.child.0", 1),
        ("vote.after_up", 3),
        ("vote.decided", 3),
    ],
)
def test_root_inner_rank_and_leaf_killed_at_every_frame_of_the_vote(moment: str, rank: int, lab: Lab, kill: Killing) -> None:
    """Of four ranks 0 is the root, with the children 1 and 2; 3 is a child of 1."""
    reference = lab.reference("batchnorm", nodes=4)
    with lab.cluster("batchnorm", nodes=4, standbys=1, faults=kill(moment, rank=rank, step=3)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
def test_a_rank_killed_while_it_holds_an_undecided_step(lab: Lab, kill: Killing) -> None:
    """The root dies with the result, so whoever has sent its ballot cannot know; rank 2 dies while it waits for the decision."""
    reference = lab.reference("batchnorm", nodes=4)
    faults = kill("vote.decided", rank=0, step=3) + kill("vote.unknown", rank=2, step=3)
    with lab.cluster("batchnorm", nodes=4, standbys=2, faults=faults) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 2
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=2)


@BOTH
def test_rank_0_is_no_different(lab: Lab, kill: Killing) -> None:
    reference = lab.reference(nodes=3)
    with lab.cluster(nodes=3, standbys=1, faults=kill("backward", rank=0, step=3)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        (view,) = cluster.core.migrations()
        assert view.record.bytes_moved == cluster.counters(0)["state_bytes"] > 0
        reopened = [cluster.counters(rank)["survivor_links_reopened"] for rank in (1, 2)]
        assert sum(reopened) == 2 * view.record.stayer_links_reopened > 0
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
@pytest.mark.parametrize("moment", ["forward", "vote.begin", "vote.decided", "optimizer.begin"])
def test_a_rank_killed_in_step_0(moment: str, lab: Lab, kill: Killing) -> None:
    reference = lab.reference("batchnorm", nodes=3)
    with lab.cluster("batchnorm", nodes=3, standbys=1, faults=kill(moment, rank=1, step=0)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
def test_a_rank_killed_before_the_last_vote_is_decided_is_replaced(lab: Lab, kill: Killing) -> None:
    reference = lab.reference(nodes=3, steps=4)
    with lab.cluster(nodes=3, standbys=1, steps=4, faults=kill("vote.begin", rank=1, step=4)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
    Outcome.of(cluster.folder).assert_same_as(reference)


def test_a_rank_killed_after_the_last_vote_takes_nothing_back_but_the_job_says_so(lab: Lab, kill: Killing) -> None:
    reference = lab.reference(nodes=3, steps=4)
    with lab.cluster(nodes=3, standbys=1, steps=4, faults=kill("vote.decided", rank=1, step=4)) as cluster:
        over = cluster.run()
        assert (over.exit_code, "lost after the last step" in over.reason) == (1, True), cluster.report()
    outcome = Outcome.of(cluster.folder)
    assert outcome.losses == reference.losses
    assert outcome.digests.items() <= reference.digests.items()


@BOTH
@pytest.mark.parametrize("moment", ["install.received", "state.loading", "state.loaded", "go.received", "step.begin"])
def test_the_joiner_is_lost_too(moment: str, lab: Lab, kill: Killing) -> None:
    """1. rank 1 is lost in step 3. 2. its replacement is lost while it joins. 3. another one joins."""
    reference = lab.reference("batchnorm", nodes=3)
    faults = [*kill("forward", rank=1, step=3), {"point": moment, "incarnation": FIRST_STANDBY_OF_3, "action": "kill"}]
    with lab.cluster("batchnorm", nodes=3, standbys=2, gate=3, faults=faults) as cluster:
        cluster.stand_at_gate(standbys=2, step=3)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 2
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
def test_a_rank_that_is_lost_before_anything_is_committed_starts_the_job_anew(lab: Lab, kill: Killing) -> None:
    reference = lab.reference("batchnorm", nodes=3)
    with lab.cluster("batchnorm", nodes=3, standbys=1, faults=kill("boundary", rank=1, step=-1)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
@pytest.mark.parametrize("moment", ["install.received", "go.received", "boundary"])
def test_a_survivor_is_lost_during_the_recovery(moment: str, lab: Lab, kill: Killing) -> None:
    """1. rank 1 is lost in step 3. 2. rank 3, neither its buddy nor its ward, is lost while rank 1 is being replaced."""
    reference = lab.reference("batchnorm", nodes=4)
    count = 2 if moment == "boundary" else 1
    faults = kill("forward", rank=1, step=3) + kill(moment, rank=3, step=3, count=count)
    with lab.cluster("batchnorm", nodes=4, standbys=2, faults=faults) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 2
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
def test_a_whole_node_is_lost(lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=2, per_node=2, steps=40)
    with lab.cluster("batchnorm", nodes=2, per_node=2, standbys=1, steps=40) as cluster:
        cluster.run_until(lambda: len(cluster.ready_standbys()) == 2 and cluster.step_of(0) > 3)
        for process in list(cluster.nodes["n1"].processes.values()):
            cluster.kill(process)
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=2)


def test_a_rank_whose_thread_fails_is_replaced_although_nothing_was_called_off(lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=3)
    faults = [{"point": "frame", "rank": 1, "step": 3, "action": "raise"}]
    with lab.cluster("batchnorm", nodes=3, standbys=1, faults=faults) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.exit_code_of(cluster.started(1)[0]) == EXIT_THREAD
    Outcome.of(cluster.folder).assert_same_as(reference)


def test_a_step_may_take_longer_than_an_installation(lab: Lab) -> None:
    """The survivors stand in the middle of step 3 for three times as long; nobody is given up for it."""
    reference = lab.reference("batchnorm", nodes=3)
    settings = CoreSettings(install_timeout_s=1.0)
    with lab.cluster("batchnorm", nodes=3, standbys=1, gate=3, settings=settings) as cluster:
        cluster.stand_at_gate(standbys=1, step=3)
        cluster.kill(cluster.member(1))
        cluster.run_until(lambda: cluster.core.sentences()["job"] == "installing epoch 1: ranks 0, 2 still in a step")
        step_ends_s = time.monotonic() + 3.0
        cluster.run_until(lambda: time.monotonic() > step_ends_s)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.core.job("job").record.epoch == 1
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
def test_a_link_that_flaps_costs_no_standby(lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=3)
    faults = [{"point": "backward", "rank": 1, "step": 3, "action": "close_link"}]
    with lab.cluster("batchnorm", nodes=3, standbys=1, faults=faults) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        members = {rank: cluster.started(rank) for rank in range(3)}
        assert all(len(lives) == 1 for lives in members.values())
    Outcome.of(cluster.folder).assert_same_as(reference)
