"""A planned migration from each side: stayer, leaver, joiner; what calls it off, and what can no longer."""

from __future__ import annotations

import pytest

from tests.core.rank_rig import Rig, of_kind, plan, table
from tmd.protocol.membership import Install, Resolution
from tmd_worker.core.instructions import (
    ActivateLinks,
    DropStaged,
    FetchFromLeaver,
    RetireLinks,
    StageLinks,
    SwitchLinks,
    TakeRole,
)
from tmd_worker.core.rank import Turn


def stayer() -> Rig:
    """Rank 1 in step 0 with everything staged for plan 1, in which r3 leaves."""
    rig = Rig().running()
    assert of_kind(rig.order(plan=plan()), StageLinks)
    rig.core.staged(1, 2)
    return rig


def leaver() -> Rig:
    """Rank 3 in step 0, armed."""
    rig = Rig("r3", 3).running()
    assert not of_kind(rig.order(plan=plan(), armed=True), StageLinks)
    return rig


def joiner() -> Rig:
    """Staged, waiting for the leaver's state."""
    rig = Rig("joiner", None).standby()
    out = rig.order(plan=plan())
    assert [take.rank for take in of_kind(out, TakeRole)] == [3]
    assert of_kind(out, StageLinks)
    assert of_kind(out, FetchFromLeaver)
    rig.core.staged(1, 3)
    return rig


def test_a_stayer_switches_at_the_boundary_after_the_flip() -> None:
    rig = stayer()
    rig.commit(ready_leavers=1)
    assert rig.core.run_epoch == 0
    boundary, out = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch) == (Turn.RUN, 1, 1)
    assert [switch.epoch for switch in of_kind(out, SwitchLinks)] == [1]
    assert rig.core.status().flipped_plan == 1


def test_the_first_yes_of_the_new_epoch_retires_the_links_to_the_leaver_once() -> None:
    rig = stayer()
    assert not of_kind(rig.commit(ready_leavers=1), RetireLinks)
    rig.core.boundary()
    assert [retire.epoch for retire in of_kind(rig.commit(), RetireLinks)] == [1]
    rig.core.boundary()
    assert not of_kind(rig.commit(), RetireLinks)


@pytest.mark.parametrize(("ready_leavers", "staged"), [(0, True), (1, False), (2, True)])
def test_nothing_flips_without_every_flag(ready_leavers: int, staged: bool) -> None:
    rig = stayer()
    rig.core.vote_ended(rig.ballot(ready_leavers=ready_leavers, staged=staged), sent=True)
    rig.core.applied()
    boundary, out = rig.core.boundary()
    assert (boundary.turn, boundary.epoch) == (Turn.RUN, 0)
    assert not of_kind(out, SwitchLinks)


def test_a_stayer_that_has_not_staged_says_so_in_the_vote() -> None:
    rig = Rig().running()
    rig.order(plan=plan())
    ballot = rig.core.vote_begins()
    assert ballot is not None
    assert (ballot.plan_min, ballot.staged, ballot.ready_leavers) == (1, False, 0)


def test_only_an_armed_leaver_raises_the_flag() -> None:
    rig = Rig("r3", 3).running()
    rig.order(plan=plan())
    ballot = rig.core.vote_begins()
    assert ballot is not None
    assert (ballot.staged, ballot.ready_leavers) == (True, 0)
    rig.core.vote_ended(ballot, sent=True)
    rig.core.applied()
    rig.core.boundary()
    rig.order(armed=True)
    ballot = rig.core.vote_begins()
    assert ballot is not None
    assert ballot.ready_leavers == 1


def test_the_leaver_freezes_at_the_boundary_after_the_flip() -> None:
    rig = leaver()
    assert rig.core.leaver_step(1) is None
    rig.commit()
    assert rig.core.leaver_step(1) is None, "its step has not ended yet"
    assert rig.core.boundary()[0].turn is Turn.WAIT
    assert rig.core.status().phase == "frozen"
    assert rig.core.leaver_step(1) == 1


def test_the_leaver_of_a_dropped_plan_never_serves() -> None:
    rig = leaver()
    rig.order(plan=None)
    with pytest.raises(LookupError):
        rig.core.leaver_step(1)


def test_the_joiner_runs_the_step_after_the_flip_in_the_new_epoch() -> None:
    rig = joiner()
    assert rig.core.boundary()[0].turn is Turn.WAIT
    assert of_kind(rig.core.state_loaded(1, 1, "exact"), ActivateLinks)
    boundary, _ = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch) == (Turn.RUN, 1, 1)
    assert rig.core.status().flipped_plan == 1


def test_the_joiner_keeps_its_role_while_the_order_names_none() -> None:
    rig = joiner()
    rig.order(armed=True)
    assert rig.core.rank == 3
    rig.order(plan=None)
    assert rig.core.rank is None


def test_what_a_joiner_holds_is_nothing_while_the_leavers_state_replaces_it() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    rig.recover(1, 5)
    rig.core.state_loaded(1, 5, "exact")
    rig.order(rank=3, install=None, resolution=None, plan=plan(base_epoch=1, epoch=2))
    assert not rig.core.status().has_state


def test_a_joiner_whose_source_broke_drops_the_plan() -> None:
    rig = joiner()
    out = rig.core.state_failed(1, "the leaver's connection closed")
    assert [drop.plan_id for drop in of_kind(out, DropStaged)] == [1]
    status = rig.core.status()
    assert (status.failed_epoch, status.dropped_plan, status.has_state) == (1, 1, False)


@pytest.mark.parametrize("lost_link", ["stage_failed", "link_broken"])
def test_a_joiner_whose_staged_link_broke_drops_the_plan(lost_link: str) -> None:
    rig = joiner()
    if lost_link == "stage_failed":
        rig.core.stage_failed(1, "end of file")
    else:
        rig.core.link_broken(1, 0, orderly=False, reason="end of file")
    assert rig.core.status().dropped_plan == 1
    assert rig.core.state_loaded(1, 1, "exact") == []
    assert rig.core.boundary()[0].turn is Turn.WAIT


def test_a_broken_staged_link_never_poisons_a_stayer() -> None:
    rig = stayer()
    out = rig.core.stage_failed(1, "the joiner is gone")
    assert of_kind(out, DropStaged)
    status = rig.core.status()
    assert (status.poisoned_epoch, status.dropped_plan, status.staged_plan) == (-1, 1, 0)
    assert rig.core.admit(in_autograd=False).name == "PROCEED"


def test_a_plan_called_off_during_a_vote_that_does_not_flip_is_dropped_after_it() -> None:
    rig = leaver()
    ballot = rig.core.vote_begins()
    assert ballot is not None
    rig.order(plan=None, armed=False)
    assert rig.core.status().dropped_plan == 0, "the flag is out: only the vote can tell"
    not_staged = type(ballot).single(epoch=0, step=0, plan=1, staged=False)
    rig.core.vote_ended(ballot.combine(not_staged), sent=True)
    assert rig.core.status().dropped_plan == 1


def test_a_plan_called_off_during_the_vote_that_flips_has_flipped() -> None:
    rig = leaver()
    result = rig.ballot()
    rig.order(plan=None, armed=False)
    rig.core.vote_ended(result, sent=True)
    rig.core.applied()
    rig.core.boundary()
    status = rig.core.status()
    assert (status.phase, status.dropped_plan, status.flipped_plan) == ("frozen", 0, 1)


def test_a_plan_called_off_between_the_flip_and_the_boundary_keeps_its_links() -> None:
    """1. the vote flips; 2. the daemon, which does not know, calls the plan off; 3. the boundary switches to what is staged."""
    rig = stayer()
    rig.commit(ready_leavers=1)
    assert not of_kind(rig.order(plan=None), DropStaged)
    assert not of_kind(rig.core.heartbeat(), DropStaged)
    boundary, out = rig.core.boundary()
    assert of_kind(out, SwitchLinks)
    assert boundary.epoch == 1
    assert rig.core.status().dropped_plan == 0


def test_poison_between_the_flip_and_the_boundary_drops_the_plan() -> None:
    rig = stayer()
    rig.commit(ready_leavers=1)
    out = rig.core.link_broken(0, 3, orderly=False, reason="end of file")
    assert of_kind(out, DropStaged)
    assert rig.core.boundary()[0].turn is Turn.WAIT
    status = rig.core.status()
    assert (status.dropped_plan, status.flipped_plan, status.next_step) == (1, 0, 1)


def test_a_plan_of_an_epoch_that_is_over_is_not_begun() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    assert not of_kind(rig.order(plan=plan()), StageLinks)
    standby = Rig("joiner", None).standby()
    assert not of_kind(standby.order(poison_epoch=0, plan=plan()), TakeRole)


def test_a_dropped_plan_does_not_come_back_and_a_new_one_may() -> None:
    rig = stayer()
    rig.core.stage_failed(1, "the joiner is gone")
    assert not of_kind(rig.core.heartbeat(), StageLinks)
    assert of_kind(rig.order(plan=plan(2, epoch=2)), StageLinks)
    rig.core.staged(1, 2)
    assert rig.core.status().staged_plan == 0, "that was for the plan before"
    rig.core.staged(2, 2)
    rig.commit(ready_leavers=1)
    assert rig.core.boundary()[0].epoch == 2


def test_a_leaver_is_brought_back_by_a_new_table() -> None:
    """1. flip, the leaver is frozen at step 1; 2. the joiner dies before any yes; 3. a table with the leaver is installed."""
    rig = leaver()
    rig.commit()
    rig.core.boundary()
    assert rig.core.status().phase == "frozen"
    rig.order(poison_epoch=1, plan=None, armed=False)
    assert rig.core.status().reported_epoch == 1
    rig.order(resolution=Resolution(epoch=1, target_step=1), install=Install(membership=table(2), target_step=1, joining={}))
    assert rig.core.boundary()[0].turn is Turn.WAIT
    rig.go(2)
    boundary, _ = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch, boundary.rollback) == (Turn.RUN, 1, 2, False)
    assert rig.core.status().phase == "running"


def test_a_frozen_leaver_does_not_mind_that_its_links_are_closed() -> None:
    """1. flip; 2. the first yes with the joiner: the stayers close their links to the leaver, long before the daemon knows."""
    rig = leaver()
    rig.commit()
    rig.core.boundary()
    assert rig.core.link_broken(0, 2, orderly=True, reason="stop") == []
    status = rig.core.status()
    assert (status.phase, status.poisoned_epoch) == ("frozen", -1)


def test_a_leaver_that_is_brought_back_minds_its_new_links() -> None:
    """Still frozen, it opens the links of the next table: one that breaks before the word to go on fails the installation."""
    rig = leaver()
    rig.commit()
    rig.core.boundary()
    rig.order(poison_epoch=1, plan=None, armed=False)
    rig.order(resolution=Resolution(epoch=1, target_step=1), install=Install(membership=table(2), target_step=1, joining={}))
    rig.core.links_ready(2, 4)
    rig.core.link_broken(2, 0, orderly=False, reason="end of file")
    assert rig.core.status().failed_epoch == 2


def test_a_failure_after_the_flip_ends_the_new_epoch_on_a_stayer() -> None:
    rig = stayer()
    rig.commit(ready_leavers=1)
    rig.core.boundary()
    rig.core.link_broken(1, 3, orderly=False, reason="the joiner is gone")
    status = rig.core.status()
    assert (status.poisoned_epoch, status.reported_epoch, status.next_step) == (1, 1, 1)


def test_the_last_vote_does_not_flip() -> None:
    rig = leaver()
    ballot = rig.core.vote_begins(last=True)
    assert ballot is not None
    assert (ballot.plan_max, ballot.ready_leavers) == (0, 0)
