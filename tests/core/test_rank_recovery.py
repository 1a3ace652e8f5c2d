"""After an unplanned loss: the resolution decides the open step, the next table is installed, the daemon says go."""

from __future__ import annotations

import pytest

from tests.core.rank_rig import Rig, of_kind, plan, table
from tmd.protocol.membership import Install, Resolution, Source
from tmd_worker.core.instructions import (
    ActivateLinks,
    CloseLinks,
    Exit,
    FetchFromSurvivors,
    OpenLinks,
    SendStatus,
    TakeRole,
    Wake,
)
from tmd_worker.core.rank import BrokenInvariant, Turn, Verdict


def test_an_unknown_vote_is_applied_when_somebody_saw_the_yes() -> None:
    rig = Rig().running().unknown()
    assert of_kind(rig.order(poison_epoch=0, resolution=Resolution(epoch=0, target_step=1)), Wake)
    assert rig.core.verdict() is Verdict.APPLY
    rig.core.applied()
    assert (rig.core.next_step, rig.core.applied_step) == (1, 1)
    assert rig.core.status().commits[-1].step == 0
    assert rig.core.boundary()[0].turn is Turn.WAIT


def test_an_unknown_vote_is_discarded_when_nobody_saw_the_yes() -> None:
    rig = Rig().running().unknown()
    assert rig.core.verdict() is Verdict.BLOCK
    rig.order(poison_epoch=0, resolution=Resolution(epoch=0, target_step=0))
    assert rig.core.verdict() is Verdict.DISCARD
    assert (rig.core.next_step, rig.core.status().commits) == (0, ())


def test_a_resolution_is_taken_once() -> None:
    rig = Rig().running().unknown()
    resolution = Resolution(epoch=0, target_step=1)
    rig.order(poison_epoch=0, resolution=resolution)
    rig.order(resolution=resolution)
    rig.core.heartbeat()
    assert rig.core.next_step == 1


def test_a_resolution_waits_until_this_rank_has_reported() -> None:
    """1. poison while the ballot is under way; 2. a resolution that took this rank for lost; 3. the vote says yes after all."""
    rig = Rig().running()
    result = rig.ballot()
    rig.order(poison_epoch=0, resolution=Resolution(epoch=0, target_step=1))
    assert rig.core.resolved_epoch == -1
    rig.core.vote_ended(result, sent=True)
    rig.core.heartbeat()
    assert (rig.core.resolved_epoch, rig.core.next_step) == (0, 1)


def test_a_resolution_that_this_rank_cannot_follow_is_a_broken_invariant() -> None:
    rig = Rig().running()
    rig.commit()
    rig.order(poison_epoch=0)
    with pytest.raises(BrokenInvariant, match="is at step 1"):
        rig.order(resolution=Resolution(epoch=0, target_step=0))


def test_a_resolution_of_epochs_before_this_rank_joined_is_not_for_it() -> None:
    rig = Rig("joiner", None).standby()
    rig.recover(3, 7)
    rig.order(rank=2)
    rig.core.state_loaded(3, 7, "exact")
    rig.go(3)
    rig.core.boundary()
    rig.order(resolution=Resolution(epoch=2, target_step=7))
    assert rig.core.next_step == 7


def test_a_survivor_is_linked_when_its_links_are_open_and_runs_only_after_the_word_to_go_on() -> None:
    rig = Rig().running()
    rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    out = rig.recover(1, 0)
    assert [opening.membership.epoch for opening in of_kind(out, OpenLinks)] == [1]
    assert not of_kind(out, FetchFromSurvivors)
    rig.core.discarded()
    rig.core.links_ready(1, 4)
    assert rig.core.status().linked_epoch == 1
    assert rig.core.boundary()[0].turn is Turn.WAIT
    assert of_kind(rig.order(live_epoch=1), ActivateLinks)
    assert rig.core.boundary()[0].turn is Turn.RUN


def test_a_joiner_is_linked_when_links_and_state_are_there() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    out = rig.recover(1, 5)
    assert of_kind(out, OpenLinks)
    assert of_kind(out, FetchFromSurvivors)
    rig.core.links_ready(1, 3)
    assert rig.core.status().linked_epoch == -1
    rig.core.state_loaded(1, 5, "exact")
    assert rig.core.status().linked_epoch == 1
    rig.order(live_epoch=1)
    boundary, _ = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch, boundary.rollback) == (Turn.RUN, 5, 1, False)


def test_a_joiner_that_has_loaded_does_not_load_again_for_the_same_step() -> None:
    """1. loaded for epoch 1, which fails; 2. the daemon, which has not heard, has it join epoch 2 as well; 3. it says so now and
    has it not join epoch 3: at no moment may it have given up what it said it has."""
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    rig.recover(1, 5)
    rig.core.state_loaded(1, 5, "exact")
    assert not of_kind(rig.recover(2, 5), FetchFromSurvivors)
    assert rig.core.status().has_state
    rig.core.links_ready(2, 4)
    assert rig.core.status().linked_epoch == 2


def test_a_table_that_counts_on_state_that_is_not_there_is_a_broken_invariant() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    with pytest.raises(BrokenInvariant, match="without state"):
        rig.order(install=Install(membership=table(1, r2="joiner"), target_step=0, joining={}))


def test_state_for_an_installation_that_was_called_off_is_not_taken() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    rig.recover(1, 5)
    rig.order(poison_epoch=1)
    assert rig.core.state_loaded(1, 5, "exact") == []
    assert rig.core.state_loaded(4, 5, "exact") == []
    assert not rig.core.status().has_state


def test_a_rank_that_is_dialed_in_vain_is_named_for_this_installation_alone() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    rig.recover(1, 0)

    def said() -> tuple[int, int]:
        return rig.core.status().unreached_epoch, rig.core.status().unreached

    assert said() == (1, -1)
    rig.core.heartbeat(2)
    assert said() == (1, 2)
    rig.core.heartbeat()
    assert said() == (1, -1)
    rig.core.links_failed(1, "rank 2 does not answer", 2)
    rig.core.heartbeat()
    assert said() == (1, 2)
    rig.core.links_failed(0, "old news", 0)
    assert said() == (1, 2)
    rig.recover(2, 0)
    assert said() == (2, -1)


def test_an_installation_that_failed_says_so_and_the_next_one_is_tried() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    rig.recover(1, 0)
    rig.core.links_failed(1, "rank 2 does not answer")
    rig.core.links_ready(1, 0)
    status = rig.core.status()
    assert (status.failed_epoch, status.linked_epoch, status.reason) == (1, 0, "rank 2 does not answer")
    assert of_kind(rig.recover(2, 0), OpenLinks)
    rig.go(2)
    assert rig.core.live_epoch == 2


def test_go_for_an_epoch_whose_link_broke_meanwhile_poisons_it() -> None:
    """1. linked; 2. a link breaks, which only makes the installation fail; 3. go was already under way."""
    rig = Rig().running()
    rig.order(poison_epoch=0)
    rig.recover(1, 0)
    rig.core.links_ready(1, 4)
    rig.core.link_broken(1, 2, orderly=False, reason="end of file")
    assert rig.core.poisoned_epoch == 0
    out = rig.order(live_epoch=1)
    assert [close.epoch for close in of_kind(out, CloseLinks)] == [1]
    status = rig.core.status()
    assert (status.live_epoch, status.poisoned_epoch, status.reported_epoch) == (1, 1, 1)


def test_an_installation_waits_until_the_open_step_is_resolved() -> None:
    rig = Rig().running().unknown()
    install = Install(membership=table(1), target_step=1, joining={})
    assert not of_kind(rig.order(poison_epoch=0, install=install), OpenLinks)
    assert of_kind(rig.order(resolution=Resolution(epoch=0, target_step=1)), OpenLinks)


def test_an_installation_for_another_step_is_a_broken_invariant() -> None:
    rig = Rig().running()
    with pytest.raises(BrokenInvariant, match="the install says 1"):
        rig.order(poison_epoch=0, install=Install(membership=table(1), target_step=1, joining={}))


def test_a_table_without_this_incarnation_is_not_installed() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    assert not of_kind(rig.recover(1, 0, lost=1), OpenLinks)


def test_state_is_served_only_while_nothing_can_change_it() -> None:
    rig = Rig().running()
    assert rig.core.may_serve(step=1) is False, "it runs"
    rig.commit()
    rig.order(poison_epoch=0)
    assert rig.core.may_serve(step=1) is None, "the step's tail is not done"
    rig.core.boundary()
    assert rig.core.may_serve(step=1) is True
    assert rig.core.may_serve(step=2) is None, "not resolved yet"
    assert rig.core.may_serve(step=0) is False, "it is past that"
    rig.recover(1, 1)
    rig.go(1)
    assert rig.core.may_serve(step=1) is False, "the next step may begin at any moment"


def test_a_survivor_says_whether_it_is_still_in_its_step() -> None:
    rig = Rig().running()
    out = rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    assert of_kind(out, SendStatus)[-1].status.in_step
    rig.core.discarded()
    _, out = rig.core.boundary()
    assert not of_kind(out, SendStatus)[-1].status.in_step
    assert not of_kind(rig.core.boundary()[1], SendStatus)


def test_steps_that_count_do_not_say_when_they_end() -> None:
    rig = Rig().running()
    rig.commit()
    assert not of_kind(rig.core.boundary()[1], SendStatus)


def test_an_approximate_record_is_not_handed_on_before_the_job_has_gone_on_with_it() -> None:
    """Else: 1. a joiner loads approximately; 2. it hands that record to its buddy; 3. it dies before go; 4. the next joiner gets
    it as exact, and no ledger says that it is not."""
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    rig.recover(1, 5)
    rig.core.state_loaded(1, 5, "approximate")
    assert not rig.core.may_hand_record()
    rig.go(1)
    rig.core.boundary()
    assert rig.core.may_hand_record()


def test_an_exact_record_is_handed_on_at_once() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=2)
    rig.recover(1, 5)
    rig.core.state_loaded(1, 5, "exact")
    assert rig.core.may_hand_record()


def test_a_rank_does_not_take_a_second_role() -> None:
    rig = Rig().running()
    assert not of_kind(rig.order(rank=2), TakeRole)
    assert rig.core.rank == 1
    assert "told to become rank 2" in rig.core.status().reason


def test_a_second_loss_during_the_recovery_raises_the_epoch_again() -> None:
    """1. rank 2 lost, epoch 1 linked; 2. rank 3 lost before go; 3. epoch 2 has both replaced; the decision stands."""
    rig = Rig().running().unknown()
    rig.recover(1, 1)
    rig.core.links_ready(1, 4)
    rig.core.link_broken(1, 3, orderly=False, reason="end of file")
    rig.core.applied()
    sources = {2: Source(replica_rank=0, record_rank=None), 3: Source(replica_rank=0, record_rank=0)}
    install = Install(membership=table(2, r2="a", r3="b"), target_step=1, joining=sources)
    rig.order(poison_epoch=1, resolution=Resolution(epoch=1, target_step=1), install=install)
    rig.go(2)
    boundary, _ = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch) == (Turn.RUN, 1, 2)


def test_a_joiner_that_is_retired_with_its_plan_leaves() -> None:
    rig = Rig("joiner", None).standby()
    rig.order(rank=3, plan=plan())
    assert of_kind(rig.order(plan=None, rank=None, retired=True), Exit)
