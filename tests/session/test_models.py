"""What a training script may use comes through the loss of a rank bit by bit."""

from __future__ import annotations

import pytest

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome
from tests.session.training import VARIANTS
from tests.transports import BOTH


@BOTH
@pytest.mark.parametrize("variant", VARIANTS, ids="+".join)
def test_a_rank_that_is_lost_in_backward(variant: tuple[str, ...], lab: Lab, kill: Killing) -> None:
    lose_a_rank("backward", variant, lab, kill)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != ("noisy_tail",)], ids="+".join)
def test_a_rank_that_is_lost_in_the_vote(variant: tuple[str, ...], lab: Lab, kill: Killing) -> None:
    lose_a_rank("vote.after_up", variant, lab, kill)


@BOTH
@pytest.mark.parametrize(
    ("moment", "count"), [("backward", 1), ("backward", 2), ("backward", 3), ("forward", 3), ("vote.begin", 1)]
)
def test_two_optimizers_of_which_the_first_had_stepped_when_a_rank_is_lost(
    moment: str, count: int, lab: Lab, kill: Killing
) -> None:
    """The discriminator's backward passes once, the generator's twice: the second kill and those after it come when the
    discriminator's optimizer has stepped, which is to be undone."""
    reference = lab.reference("gan", nodes=3, steps=10)
    with lab.cluster("gan", nodes=3, standbys=1, steps=10, faults=kill(moment, rank=1, step=4, count=count)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


def test_averages_with_batch_statistics_take_a_discarded_step_once(lab: Lab, kill: Killing) -> None:
    lose_a_rank("backward", ("batchnorm", "ema_module"), lab, kill)


@pytest.mark.parametrize("moment", ["vote.after_up", "tail"])
def test_averages_with_batch_statistics_lost_after_the_vote_are_the_same_or_named(moment: str, lab: Lab, kill: Killing) -> None:
    """Code after the vote copies buffers that differ between ranks into the average: nobody knows what the lost rank's held."""
    reference = lab.reference("batchnorm", "ema_module", nodes=3, steps=10)
    faults = kill(moment, rank=1, step=4)
    with lab.cluster("batchnorm", "ema_module", nodes=3, standbys=1, steps=10, faults=faults) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        named = cluster.core.job("job").record.approximations
    if not named:
        Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)
    else:
        assert "buffer" in named[0]


@BOTH
@pytest.mark.parametrize("moment", ["backward", "vote.decided", "tail"])
def test_a_mean_that_is_only_logged_may_follow_the_vote(moment: str, lab: Lab, kill: Killing) -> None:
    """The others may log NaN for the step in which a rank is lost; what they train is the same."""
    reference = lab.reference("mean_loss", nodes=3, steps=10)
    with lab.cluster("mean_loss", nodes=3, standbys=1, steps=10, faults=kill(moment, rank=1, step=4)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
    outcome = Outcome.of(cluster.folder)
    assert outcome.digests == reference.digests
    differing = {step for (rank, step), loss in outcome.losses.items() if loss != reference.losses[rank, step]}
    assert differing <= {4}


def test_random_numbers_drawn_after_the_vote_by_a_rank_that_is_lost_there_are_missed_and_the_job_says_so(
    lab: Lab, kill: Killing
) -> None:
    with lab.cluster("noisy_tail", nodes=3, standbys=1, steps=10, faults=kill("vote.after_up", rank=1, step=4)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        (approximation,) = cluster.core.job("job").record.approximations
        assert approximation.startswith("step 5: RNG")


def lose_a_rank(moment: str, variant: tuple[str, ...], lab: Lab, kill: Killing) -> None:
    reference = lab.reference(*variant, nodes=3, steps=10)
    with lab.cluster(*variant, nodes=3, standbys=1, steps=10, faults=kill(moment, rank=1, step=4)) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)
