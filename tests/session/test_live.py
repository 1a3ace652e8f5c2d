"""The step loop over the real core: whatever is discarded leaves no trace, whatever is decided is applied once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.session.rig import Rig, yes
from tmd.protocol.exits import EXIT_HELD, EXIT_TORN
from tmd_worker import live, runtime
from tmd_worker.core.ballot import Ballot
from tmd_worker.step import Step, StepMisused
from tmd_worker.warmup import LEAST_STEPS

TOTAL = 5
BROKEN_STEP = 2


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def no_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int, message: str) -> None:
        raise Ended(code, message)

    for module in (live, runtime):
        monkeypatch.setattr(module, "end_process", end)


class Job:
    """A small model with dropout, batch statistics, a scheduler and an average kept after the step."""

    def __init__(self, *, rig: Rig | None = None) -> None:
        torch.manual_seed(3)
        self.rig = rig or Rig()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.rig.track(model=self.model, optimizer=self.optimizer, schedule=self.schedule, data=batches)
        self.losses: list[tuple[int, float]] = []
        self.seen: list[Step] = []
        self.at: dict[str, Callable[[], None]] = {}

    def passing(self, moment: str, step: Step) -> None:
        """Something happens at this moment of step BROKEN_STEP, once."""
        if step.index == BROKEN_STEP and not step.shadow and moment in self.at:
            self.at.pop(moment)()

    def run(self, total: int = TOTAL) -> Job:
        self.rig.begin()
        for step in self.rig.loop.warm_up(standby=False):
            self.step(step)
        for step in self.rig.loop.run(total):
            self.step(step)
        return self

    def step(self, step: Step) -> None:
        self.seen.append(step)
        with step:
            self.passing("begin", step)
            self.optimizer.zero_grad()
            loss = self.model(step.batch).pow(2).mean()
            self.passing("forward", step)
            loss.backward()
            self.passing("backward", step)
            self.optimizer.step()
            self.passing("applied", step)
        self.schedule.step()
        self.passing("tail", step)
        if step.committed:
            self.losses.append((step.index, loss.item()))

    def outcome(self) -> tuple[list[tuple[int, float]], dict[str, str]]:
        return self.losses, self.rig.tracked.digest()


def loop(job: Job, total: int) -> Iterator[Step]:
    yield from job.rig.loop.warm_up(standby=False)
    yield from job.rig.loop.run(total)


def batches(position: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * rank + position))


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[tuple[int, float]], dict[str, str]]:
    return Job().run().outcome()


def test_every_step_is_committed_once_and_voted_once(undisturbed: Any) -> None:
    job = Job().run()
    assert [index for index, _ in job.losses] == list(range(TOTAL))
    assert [ballot.step_min for ballot in job.rig.fabric.ballots] == [*range(TOTAL), TOTAL]
    assert job.outcome() == undisturbed
    assert job.rig.core.phase == "finished"


def test_shadow_steps_leave_no_trace() -> None:
    job = Job()
    job.rig.begin()
    before = job.rig.tracked.digest(), torch.get_rng_state()
    first = job.rig.tracked.loaders["data"].state()
    for step in job.rig.loop.warm_up(standby=False):
        job.step(step)
        assert job.rig.fabric.sandbox
        assert not step.committed
    assert len(job.seen) == LEAST_STEPS
    assert job.rig.tracked.digest() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert job.rig.tracked.loaders["data"].state() == first
    assert not job.rig.fabric.sandbox
    assert job.rig.fabric.ballots == []


@pytest.mark.parametrize("moment", ["begin", "forward", "backward"])
def test_a_link_that_breaks_before_the_vote_discards_the_step_and_it_runs_again_the_same(moment: str, undisturbed: Any) -> None:
    job = Job()

    def lose_a_rank() -> None:
        job.rig.break_link()
        job.rig.recover(BROKEN_STEP)

    job.at[moment] = lose_a_rank
    assert job.run().outcome() == undisturbed
    assert [step.index for step in job.seen[LEAST_STEPS:]] == [0, 1, 2, 2, 3, 4]
    assert job.rig.core.counters["steps_redone"] == 1


@pytest.mark.parametrize("moment", ["applied", "tail"])
def test_a_link_that_breaks_after_the_vote_takes_nothing_back(moment: str, undisturbed: Any) -> None:
    job = Job()

    def lose_a_rank() -> None:
        job.rig.break_link()
        job.rig.recover(BROKEN_STEP + 1)

    job.at[moment] = lose_a_rank
    assert job.run().outcome() == undisturbed
    assert [step.index for step in job.seen[LEAST_STEPS:]] == list(range(TOTAL))


@pytest.mark.parametrize("target_step", [BROKEN_STEP, BROKEN_STEP + 1])
def test_an_unknown_vote_waits_for_the_resolution(target_step: int, undisturbed: Any) -> None:
    job = Job()

    def breaks(_: Ballot) -> tuple[Ballot | None, bool]:
        job.rig.break_link()
        job.rig.recover(target_step)
        return None, True

    job.rig.fabric.outcomes = [yes, yes, breaks]
    assert job.run().outcome() == undisturbed
    redone = [step.index for step in job.seen].count(BROKEN_STEP) - 1
    assert redone == (target_step == BROKEN_STEP)


def test_a_ward_whose_record_does_not_come_discards_the_step_without_a_ballot(undisturbed: Any) -> None:
    job = Job()

    def lose_the_ward() -> None:
        job.rig.fabric.buddy.breaks = ward_is_lost

    def ward_is_lost() -> None:
        job.rig.break_link()
        job.rig.recover(BROKEN_STEP)

    job.at["backward"] = lose_the_ward
    assert job.run().outcome() == undisturbed
    assert [ballot.step_min for ballot in job.rig.fabric.ballots].count(BROKEN_STEP) == 1


def test_the_last_vote_is_asked_again_after_a_loss(undisturbed: Any) -> None:
    job = Job()

    def breaks(_: Ballot) -> tuple[Ballot | None, bool]:
        job.rig.break_link()
        job.rig.recover(TOTAL)
        return None, True

    job.rig.fabric.outcomes = [yes] * TOTAL + [breaks]
    assert job.run().outcome() == undisturbed
    assert [ballot.step_min for ballot in job.rig.fabric.ballots[-2:]] == [TOTAL, TOTAL]


def test_an_exception_of_the_user_leaves_the_loop() -> None:
    job = Job()

    def bug() -> None:
        raise ValueError("a bug")

    job.at["forward"] = bug
    with pytest.raises(ValueError, match="a bug"):
        job.run()
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()  # of no concern to the step that was left


def test_any_exception_of_a_body_that_is_given_up_is_a_discard(undisturbed: Any) -> None:
    job = Job()

    def garbage() -> None:
        job.rig.break_link()
        job.rig.recover(BROKEN_STEP)
        raise ValueError("the sandbox's values led here")

    job.at["forward"] = garbage
    assert job.run().outcome() == undisturbed


def test_an_exception_that_leaves_backward_while_poisoned_ends_the_rank() -> None:
    job = Job()

    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the reducer is broken now")

    def explode() -> None:
        job.rig.break_link()
        Explodes.apply(torch.ones(1, requires_grad=True)).sum().backward()

    job.at["forward"] = explode
    with pytest.raises(Ended) as ended:
        job.run()
    assert ended.value.args[0] == EXIT_TORN
    assert "the reducer is broken now" in ended.value.args[1]


def test_an_exception_in_the_middle_of_a_decided_update_ends_the_rank_if_it_is_poisoned() -> None:
    job = Job()

    class HalfApplied(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            job.rig.break_link()
            raise RuntimeError("half applied")

    torn = HalfApplied(job.model.parameters(), lr=0.1)
    job.rig.track(torn=torn)

    def train() -> None:
        job.rig.begin()
        for step in loop(job, 1):
            with step:
                job.model.zero_grad()
                job.model(step.batch).sum().backward()
                if not step.shadow:
                    torn.step()

    with pytest.raises(Ended) as ended:
        train()
    assert ended.value.args[0] == EXIT_TORN


def test_a_step_without_an_optimizer_is_voted_at_its_end() -> None:
    job = Job()
    job.rig.begin()
    for step in loop(job, 2):
        with step:
            job.model(step.batch)
            votes = len(job.rig.fabric.ballots)
        if not step.shadow:
            assert len(job.rig.fabric.ballots) == votes + 1
            assert step.committed


def test_a_scaler_that_skips_its_step_still_votes_once() -> None:
    job = Job()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    job.rig.track(scaler=scaler)
    job.rig.begin()
    before = job.model[0].weight.detach().clone()
    for step in loop(job, 1):
        with step:
            job.optimizer.zero_grad()
            loss = job.model(step.batch).pow(2).mean() * float("inf")
            scaler.scale(loss).backward()
            scaler.step(job.optimizer)
            scaler.update()
    assert len(job.rig.fabric.ballots) == 2
    assert torch.equal(job.model[0].weight, before)
    assert scaler.get_scale() == 1.0


def test_a_vote_by_hand_is_the_only_one() -> None:
    job = Job()
    job.rig.begin()
    for step in loop(job, 2):
        with step:
            job.model.zero_grad()
            job.model(step.batch).sum().backward()
            job.rig.loop.vote()
            with torch.no_grad():
                job.model[0].weight -= 0.1
    assert [ballot.step_min for ballot in job.rig.fabric.ballots] == [0, 1, 2]


def test_a_step_that_is_not_used_is_named() -> None:
    job = Job()
    job.rig.begin()
    with pytest.raises(StepMisused, match="was not used"):
        list(loop(job, 1))


def test_an_undone_optimizer_is_put_back_when_its_step_is_discarded() -> None:
    def train(disturb: bool) -> dict[str, str]:
        job = Job()
        first = torch.optim.Adam(job.model[0].parameters(), lr=0.01)
        job.rig.track(undo=True, first=first)
        job.rig.begin()
        for step in loop(job, 4):
            with step:
                job.optimizer.zero_grad()
                job.model(step.batch).pow(2).mean().backward()
                first.step()
                if disturb and step.index == 2 and not step.shadow:
                    disturb = False
                    job.rig.break_link()
                    job.rig.recover(2)
                job.optimizer.step()
        return job.rig.tracked.digest()

    assert train(True) == train(False)


@pytest.mark.parametrize("moment", ["forward", "backward", "voting"])
def test_averages_in_a_module_take_a_step_that_ran_twice_once(moment: str) -> None:
    """They belong to no optimizer, and the code after the body changes them whether the step counts or not."""

    def train(disturb: bool) -> dict[str, str]:
        job = Job()
        averages = AveragedModel(job.model, avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)
        job.rig.track(averages=averages)

        def lose_a_rank() -> None:
            job.rig.break_link()
            job.rig.recover(BROKEN_STEP)

        def breaks(_: Ballot) -> tuple[Ballot | None, bool]:
            lose_a_rank()
            return None, True

        if disturb and moment == "voting":
            job.rig.fabric.outcomes = [yes] * BROKEN_STEP + [breaks]
        elif disturb:
            job.at[moment] = lose_a_rank
        job.rig.begin()
        for step in loop(job, TOTAL):
            job.step(step)
            averages.update_parameters(job.model)
        assert job.rig.core.counters["steps_redone"] == disturb
        return job.rig.tracked.digest()

    assert train(True) == train(False)


def test_a_rank_without_word_ends_after_the_hold_limit() -> None:
    job = Job()
    job.rig.runtime.welcome = msgspec.structs.replace(job.rig.runtime.welcome, hold_limit_s=0.2)
    job.at["backward"] = job.rig.break_link
    with pytest.raises(Ended) as ended:
        job.run()
    assert ended.value.args[0] == EXIT_HELD
    assert "without word from the tmd daemon" in ended.value.args[1]
