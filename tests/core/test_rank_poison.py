"""A broken link ends the epoch for the whole process, and each rank says once and finally where it stands."""

from __future__ import annotations

import pytest

from tests.core.rank_rig import Rig, of_kind, plan, table
from tmd.protocol.membership import Install
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.instructions import CloseLinks, Exit, OpenLinks, SendStatus
from tmd_worker.core.rank import Admission, BrokenInvariant, Turn, Verdict


def test_a_broken_link_closes_all_links_and_reports_at_once() -> None:
    rig = Rig().running()
    out = rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    assert [close.epoch for close in of_kind(out, CloseLinks)] == [0]
    (sent,) = of_kind(out, SendStatus)
    assert (sent.status.reported_epoch, sent.status.next_step, sent.status.unknown) == (0, 0, False)
    assert sent.status.broken_ranks == (2,)
    assert sent.status.phase == "holding"


def test_an_orderly_close_does_not_accuse_the_peer() -> None:
    rig = Rig().running()
    rig.core.link_broken(0, 2, orderly=True, reason="stop")
    assert rig.core.status().broken_ranks == ()
    assert rig.core.status().poisoned_epoch == 0


def test_a_poisoned_rank_does_not_vote() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    assert rig.core.vote_begins() is None


def test_a_rank_inside_the_vote_reports_only_when_the_vote_has_ended() -> None:
    """1. the ballot leaves; 2. a link breaks; 3. the vote breaks too: only now is (next step, unknown) final."""
    rig = Rig().running()
    rig.core.vote_begins()
    rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    assert rig.core.status().reported_epoch == -1
    verdict, out = rig.core.vote_ended(None, sent=True)
    assert verdict is Verdict.BLOCK
    (sent,) = of_kind(out, SendStatus)
    assert (sent.status.reported_epoch, sent.status.unknown) == (0, True)


def test_a_vote_that_broke_before_any_frame_left_is_a_discard() -> None:
    rig = Rig().running()
    rig.core.vote_begins()
    rig.order(poison_epoch=0)
    verdict, _ = rig.core.vote_ended(None, sent=False)
    assert verdict is Verdict.DISCARD
    assert not rig.core.status().unknown


def test_a_yes_that_arrives_while_poisoned_counts_and_is_reported() -> None:
    rig = Rig().running()
    result = rig.ballot()
    rig.order(poison_epoch=0)
    verdict, out = rig.core.vote_ended(result, sent=True)
    assert verdict is Verdict.APPLY
    (sent,) = of_kind(out, SendStatus)
    assert (sent.status.reported_epoch, sent.status.next_step, sent.status.unknown) == (0, 1, False)


def test_poison_between_the_yes_and_the_end_of_the_step_reports_the_next_step() -> None:
    rig = Rig().running()
    rig.commit()
    rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    status = rig.core.status()
    assert (status.reported_epoch, status.next_step, status.applied_step) == (0, 1, 1)
    assert rig.core.boundary()[0].turn is Turn.WAIT


def test_a_vote_that_breaks_without_poison_is_a_broken_invariant() -> None:
    rig = Rig().running()
    rig.core.vote_begins()
    with pytest.raises(BrokenInvariant):
        rig.core.vote_ended(None, sent=True)


def test_a_vote_on_another_step_is_a_broken_invariant() -> None:
    rig = Rig().running()
    result = rig.ballot()
    ahead = result.combine(Ballot.single(epoch=0, step=1))
    with pytest.raises(BrokenInvariant):
        rig.core.vote_ended(ahead, sent=True)


@pytest.mark.parametrize(("in_autograd", "expected"), [(False, Admission.DISCARD), (True, Admission.LOCAL)])
def test_a_collective_of_a_poisoned_rank_is_local_inside_autograd_and_a_discard_outside(
    in_autograd: bool, expected: Admission
) -> None:
    rig = Rig().running()
    assert rig.core.admit(in_autograd=in_autograd) is Admission.PROCEED
    rig.order(poison_epoch=0)
    assert rig.core.admit(in_autograd=in_autograd) is expected


def test_a_collective_after_the_yes_is_refused_unless_it_is_log_only() -> None:
    rig = Rig().running()
    rig.commit()
    assert rig.core.admit(in_autograd=False) is Admission.AFTER_VOTE
    assert rig.core.admit(in_autograd=False, log_only=True) is Admission.PROCEED
    rig.order(poison_epoch=0)
    assert rig.core.admit(in_autograd=False, log_only=True) is Admission.LOCAL


def test_the_dead_attempt_stays_poisoned_after_the_word_to_go_on() -> None:
    """1. poison in backward; 2. recovery says go for epoch 1; 3. backward still runs: only a boundary raises its epoch."""
    rig = Rig().running()
    rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    rig.recover(1, 0)
    rig.go(1)
    assert rig.core.live_epoch == 1
    assert rig.core.admit(in_autograd=False) is Admission.DISCARD
    rig.core.discarded()
    boundary, _ = rig.core.boundary()
    assert (boundary.turn, boundary.step, boundary.epoch, boundary.rollback) == (Turn.RUN, 0, 1, True)


def test_a_link_of_an_epoch_that_is_over_says_nothing() -> None:
    rig = Rig().running()
    rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    assert rig.core.link_broken(0, 3, orderly=False, reason="end of file") == []


def test_a_link_kept_over_a_flip_poisons_the_new_epoch_though_reported_under_the_old_one() -> None:
    """1. the reader sees the end of a link of epoch 0; 2. the main thread flips to epoch 1; 3. the reader reports epoch 0."""
    rig = Rig().running()
    rig.order(plan=plan())
    rig.core.staged(1, 2)
    rig.commit(ready_leavers=1)
    rig.core.boundary()
    assert rig.core.run_epoch == 1
    assert rig.core.link_broken(0, 3, orderly=False, reason="the leaver's link") == []
    out = rig.core.link_broken(0, 2, orderly=False, reason="end of file")
    assert [close.epoch for close in of_kind(out, CloseLinks)] == [1]


def test_a_dying_neighbour_on_the_node_poisons_like_its_broken_link() -> None:
    rig = Rig().running()
    assert rig.core.peer_exiting("somebody else") == []
    assert rig.core.peer_exiting("r1") == []
    assert of_kind(rig.core.peer_exiting("r3"), CloseLinks)
    assert rig.core.status().broken_ranks == (3,)


def test_old_repeated_and_foreign_orders_do_nothing() -> None:
    rig = Rig().running()
    rig.order(poison_epoch=0)
    order = rig.core.order
    assert order is not None
    assert rig.core.on_directive(order) == []
    newer_life = type(order)(
        **{name: getattr(order, name) for name in order.__struct_fields__} | {"generation": 2, "sequence": 1}
    )
    assert rig.core.on_directive(newer_life) != []
    assert rig.order(poison_epoch=5) == []
    assert rig.core.poisoned_epoch == 0


def test_a_retired_incarnation_leaves() -> None:
    assert [exit_.code for exit_ in of_kind(Rig().running().order(retired=True), Exit)] == [0]


def test_after_the_last_vote_nothing_is_poisoned_any_more() -> None:
    rig = Rig().running()
    rig.commit()
    rig.core.boundary()
    ballot = rig.core.vote_begins(last=True)
    assert ballot is not None
    rig.core.vote_ended(ballot, sent=True)
    rig.core.finished()
    rig.order(poison_epoch=0)
    assert rig.core.link_broken(0, 2, orderly=True, reason="stop") == []
    status = rig.core.status()
    assert (status.phase, status.next_step, status.poisoned_epoch) == ("finished", 2, -1)
    assert rig.core.admit(in_autograd=False) is Admission.PROCEED


def test_poison_during_the_warm_up_holds_at_the_first_boundary() -> None:
    rig = Rig()
    rig.order(install=Install(membership=table(0), target_step=0, joining={}, fresh=True))
    rig.core.links_ready(0, 4)
    rig.order(live_epoch=0)
    rig.core.build_begins()
    rig.core.warm_up_begins()
    rig.order(poison_epoch=0)
    rig.core.warm_up_ended()
    assert rig.core.status().phase == "holding"
    assert rig.core.boundary()[0].turn is Turn.WAIT
    assert of_kind(rig.recover(1, 0), OpenLinks)
    rig.go(1)
    assert rig.core.boundary()[0].turn is Turn.RUN


def test_the_users_exception_is_kept_for_the_daemon() -> None:
    rig = Rig().running()
    (sent,) = of_kind(rig.core.failed("Traceback: ..."), SendStatus)
    assert (sent.status.phase, sent.status.error) == ("failed", "Traceback: ...")
