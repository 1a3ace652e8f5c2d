"""Who is replaced when links cannot be opened: whom the pairs speak against, not for ever whoever joins."""

from __future__ import annotations

import pytest

from tests.core.daemon_rig import Cluster


def running(nnodes: int = 4, standbys: int = 4, *, silent: bool, **settings: float) -> Cluster:
    """`silent`: who dials in vain waits, as behind a firewall that drops, or at a rank that is out of descriptors."""
    cluster = Cluster(nnodes=nnodes, standbys=standbys, install_timeout_s=2.0, **settings)
    cluster.train(5)
    cluster.cuts_are_silent = silent
    return cluster


def lost(cluster: Cluster) -> dict[str, str]:
    """Incarnation -> why, of all that were lost."""
    return {rank.incarnation: rank.reason for rank in cluster.ledger.ranks.values() if rank.state == "lost"}


@pytest.mark.parametrize("silent", [False, True])
def test_a_survivor_to_which_no_joiner_gets_a_link_is_replaced_after_the_second_joiner(silent: bool) -> None:
    """
    1. Rank 3 is lost, and rank 2 can take no connections any more: out of descriptors, for example. Only the joiner dials it.
    2. The joiner is replaced first: the others had their links until just now.
    3. The next joiner comes no further: now rank 2 is what both have in common. It goes, the second joiner stays.
    """
    cluster = running(silent=silent)
    outcast, killed = cluster.cut_off(2), cluster.kill_rank(3)
    joiner = cluster.incarnations()[3]
    cluster.pass_time(20.0)
    assert cluster.job.state == "running"
    assert lost(cluster).keys() == {killed, joiner, outcast}
    assert lost(cluster)[joiner].startswith("no link between it and rank 2 could be opened")
    assert lost(cluster)[outcast] == "2 others, one after the other or at once, could open no link to it"
    cluster.train(2)
    assert sorted(cluster.migration().leavers) == [2, 3]


@pytest.mark.parametrize("silent", [False, True])
def test_a_survivor_that_nobody_reaches_is_replaced_at_once_and_the_joiner_is_not(silent: bool) -> None:
    cluster = running(silent=silent)
    outcast, killed = cluster.cut_off(0), cluster.kill_rank(1)
    joiner = cluster.incarnations()[1]
    cluster.pass_time(20.0)
    assert lost(cluster).keys() == {killed, outcast}
    assert cluster.incarnations()[1] == joiner
    cluster.train(2)


@pytest.mark.parametrize("silent", [False, True])
def test_a_joiner_that_reaches_nobody_is_replaced_alone(silent: bool) -> None:
    cluster = running(silent=silent)
    for rank in (0, 1, 2):
        cluster.cuts |= {(cluster.incarnations()[rank], joiner.core.incarnation) for joiner in [cluster.standby_on("n4")]}
    killed = cluster.kill_rank(3)
    joiner = cluster.incarnations()[3]
    assert cluster.ranks[joiner].agent.node == "n4"
    cluster.pass_time(20.0)
    assert lost(cluster).keys() == {killed, joiner}
    cluster.train(2)


@pytest.mark.parametrize("silent", [False, True])
def test_of_two_survivors_that_do_not_reach_one_another_the_one_with_more_failures_goes(silent: bool) -> None:
    """A firewall between ranks 1 and 2 after a link has broken; of rank 1 and 3 as well."""
    cluster = running(silent=silent)
    cut_off = cluster.cut_off(1, 2)
    cluster.cut_off(1, 3)
    cluster.flap(1, 2)
    cluster.pass_time(20.0)
    assert lost(cluster).keys() == {cut_off}
    cluster.train(2)


@pytest.mark.parametrize("silent", [False, True])
def test_between_two_equals_the_higher_number_goes_and_it_is_said(silent: bool) -> None:
    cluster = running(silent=silent)
    higher = cluster.incarnations()[2]
    cluster.cut_off(1, 2)
    cluster.flap(1, 2)
    cluster.pass_time(20.0)
    (reason,) = lost(cluster).values()
    assert lost(cluster).keys() == {higher}
    assert reason == (
        "no link between it and rank 1 could be opened in 3 attempts to install an epoch; nothing tells which of the two is at "
        "fault: the higher number goes"
    )
    cluster.train(2)


@pytest.mark.parametrize("silent", [False, True])
def test_two_survivors_are_given_time(silent: bool) -> None:
    """What passes within two attempts costs nobody."""
    cluster = running(silent=silent)
    cluster.cut_off(1, 2)
    cluster.flap(1, 2)
    cluster.pass_time(2.5 if silent else 0.1)
    cluster.cuts.clear()
    cluster.pass_time(3.0)
    assert (lost(cluster), cluster.job.state) == ({}, "running")
    cluster.train(2)


def test_the_only_rank_with_the_state_is_never_given_up() -> None:
    """Two ranks: what joiners cannot reach is all that is left. They are tried one after the other, until the time is up."""
    cluster = running(nnodes=2, standbys=3, silent=False, hold_limit_s=30.0)
    last = cluster.cut_off(0)
    cluster.kill_rank(1)
    cluster.pass_time(40.0)
    assert (cluster.job.state, cluster.job.exit_code) == ("failed", 75)
    assert last not in lost(cluster)
    assert len(lost(cluster)) > 2


def test_who_only_waits_for_a_rank_that_dials_in_vain_is_spared() -> None:
    """
    1. Ranks 1 and 2 do not reach one another; rank 2, which dials, comes no further, so rank 3 waits for its word, too.
    2. All of them are late in three attempts: rank 2 goes, rank 3 stays.
    """
    cluster = running(silent=True)
    higher, waits = cluster.incarnations()[2], cluster.member(3)
    cluster.cut_off(1, 2)
    waits.waits = True
    cluster.flap(1, 2)
    while not lost(cluster):
        cluster.pass_time(0.5)
    waits.waits = False
    cluster.pass_time(8.0)
    assert lost(cluster).keys() == {higher}
    assert cluster.member(3) is waits
    cluster.train(2)
