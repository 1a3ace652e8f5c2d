"""What the daemon wants of one rank, compared with what is: each part does the difference, and does nothing the second time."""

from __future__ import annotations

from tmd.protocol.rank import Directive
from tmd_worker.core.answers import BrokenInvariant
from tmd_worker.core.instructions import ActivateLinks, FetchFromLeaver, FetchFromSurvivors, OpenLinks, StageLinks, Wake
from tmd_worker.core.state import RankState


def reconsider(state: RankState, order: Directive) -> None:
    """Idempotent: every part acts only on what is not done yet."""
    state.poison(order.poison_epoch, "the daemon called the epoch off")
    if state.plan is not None and (order.plan is None or order.plan.plan_id != state.plan.plan_id):
        state.drop_plan()
    _consider_role(state, order)
    _consider_resolution(state, order)
    _consider_install(state, order)
    _consider_go(state, order)
    _consider_plan(state, order)


def _consider_role(state: RankState, order: Directive) -> None:
    rank = order.rank
    if rank is None and state.plan is not None:
        return  # a joiner keeps the role of its plan for as long as the plan stands
    if rank == state.rank:
        return
    if state.run_epoch >= 0 or state.has_state:
        if rank is not None:
            state.reason = f"told to become rank {rank} while holding the state of rank {state.rank}"
        return
    state.take_role(rank)


def _consider_plan(state: RankState, order: Directive) -> None:
    plan = order.plan
    if plan is None or plan.plan_id <= max(state.dropped_plan, state.flipped_plan):
        return
    if state.plan is not None and state.plan.plan_id != plan.plan_id:
        return  # the older one is still in the vote under way
    joiner_rank = plan.successor.rank_of(state.incarnation)
    joins = joiner_rank is not None and joiner_rank in plan.leavers
    if plan.base_epoch <= state.poisoned_epoch or (not joins and plan.base_epoch != state.live_epoch):
        return
    if state.plan is None:
        state.plan = plan
        if joins and joiner_rank is not None:
            state.has_state = False
            state.take_role(joiner_rank)
            state.out.append(StageLinks(plan, joiner_rank))
            state.out.append(FetchFromLeaver(plan, joiner_rank))
        elif state.rank is not None and not state.leaves(plan):
            state.out.append(StageLinks(plan, state.rank))
        else:
            state.staged_plan = plan.plan_id
    state.armed = order.armed and state.leaves(plan)


def _consider_resolution(state: RankState, order: Directive) -> None:
    resolution = order.resolution
    if resolution is None or resolution.epoch <= state.resolved_epoch or state.reported_epoch < resolution.epoch:
        return
    if state.run_epoch > resolution.epoch or state.frozen:
        return  # it speaks of epochs that this rank had no part in
    state.resolved_epoch = resolution.epoch
    if state.unknown and state.next_step == resolution.target_step - 1:
        state.decide(state.vote.epoch if state.vote else state.run_epoch)
        state.yes = True
    elif state.next_step != resolution.target_step and state.has_state:
        raise BrokenInvariant(
            f"rank {state.rank} is at step {state.next_step} (unknown={state.unknown}), resolved was {resolution.target_step}"
        )
    state.unknown = False
    state.out.append(Wake())


def _consider_install(state: RankState, order: Directive) -> None:
    install = order.install
    if install is None or state.rank is None:
        return
    epoch = install.membership.epoch
    if epoch <= max(state.install_epoch, state.poisoned_epoch, state.live_epoch):
        return
    if install.membership.rank_of(state.incarnation) != state.rank or state.voting or state.unknown:
        return
    state.install_epoch, state.members = epoch, install.membership
    state.unreached_epoch, state.unreached = epoch, -1
    state.links_done = False
    arrived = install.fresh or (state.holds_state() and state.next_step == install.target_step)
    if not arrived and state.rank not in install.joining:
        where = f"at step {state.next_step}" if state.holds_state() else "without state"
        raise BrokenInvariant(f"rank {state.rank} is {where}, the install says {install.target_step}")
    # Who loaded for an installation before this one has arrived, whether the daemon knew or not: nobody ran meanwhile.
    state.state_done = arrived
    state.stamps["install"] = state.clock()
    state.out.append(OpenLinks(install.membership, state.rank))
    if not arrived:
        state.out.append(FetchFromSurvivors(install, state.rank))


def _consider_go(state: RankState, order: Directive) -> None:
    epoch = order.live_epoch
    if epoch <= max(state.live_epoch, state.poisoned_epoch) or epoch != state.install_epoch:
        return
    if epoch == state.failed_epoch:
        state.live_epoch = epoch
        state.poison(epoch, "a link broke between the installation and the word to go on")
    elif epoch == state.linked_epoch:
        state.live_epoch = epoch
        state.frozen = False
        state.broken_ranks.clear()
        state.reason = ""
        state.stamps["go"] = state.clock()
        state.out += [ActivateLinks(epoch), Wake()]
