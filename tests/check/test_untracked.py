"""State that the script holds and that was not tracked is named; what tracking covers, and what is constant, is not."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tmd_worker.check import findings, places
from tmd_worker.check.findings import Finding
from tmd_worker.check.untracked import Untracked
from tmd_worker.state.tracked import Tracked

SHADOW_STEPS = 2


def batches(position: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + position))


class Script:
    """A model, its optimizer and data, all tracked: a test adds what its script forgot."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.tracked = Tracked()
        self.tracked.set_role(0, 2)
        for name, obj in (("model", self.model), ("optimizer", self.optimizer), ("data", batches)):
            self.tracked.add(name, obj)
        self.clear_gradients: Callable[[], object] = self.optimizer.zero_grad

    def step(self) -> None:
        self.clear_gradients()
        self.model(self.tracked.loaders["data"].next()).pow(2).mean().backward()
        self.optimizer.step()

    def look(self, also: Callable[[], None] = lambda: None) -> dict[str, Finding]:
        """The findings by name after shadow steps that do `also` in each. The caller's variables are the script's."""
        untracked = Untracked(self.tracked)
        before = self.tracked.snapshot_all()
        untracked.begin(sys._getframe())
        with contextlib.ExitStack() as looking:
            for watch in untracked.watches:
                looking.enter_context(watch)
            for _ in range(SHADOW_STEPS):
                for watch in untracked.watches:
                    watch.next_step()
                self.step()
                also()
        untracked.steps_done(sys._getframe())
        self.tracked.restore_all(before)
        return {finding.name: finding for finding in untracked.findings(restored=True)}


@pytest.fixture(autouse=True)
def only_this_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the modules that are here only this one is the user's: other tests of the same process are large, and no part of it."""
    monkeypatch.setattr(places, "users_modules", lambda: [sys.modules[__name__]])


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_script_that_tracks_all_it_has_is_silent(script: Script) -> None:
    inner, optimizer = script.model, script.optimizer
    parameters, named = list(inner.parameters()), dict(inner.named_parameters())
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    constant = torch.ones(3)
    losses: list[float] = []
    found = script.look(lambda: losses.append(random.random()))
    assert found == {}
    assert (len(parameters), len(named), constant.sum(), criterion.weight.sum()) == (6, 6, 3, 4)
    assert optimizer is script.optimizer


# ---------------------------------------------------------------- what changed


def scaler_case() -> tuple[Any, Callable[[], None]]:
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)

    def use() -> None:
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return scaler, use


def module_case() -> tuple[Any, Callable[[], None]]:
    module = nn.BatchNorm1d(4, affine=False)
    return module, lambda: module(torch.randn(8, 4)).sum().item()


def copy_case() -> tuple[Any, Callable[[], None]]:
    average = copy.deepcopy(nn.Linear(4, 4)).requires_grad_(False)

    def update() -> None:
        for parameter in average.parameters():
            parameter.data.mul_(0.9).add_(0.1)

    return average, update


def averages_case() -> tuple[Any, Callable[[], None]]:
    values = {"weight": torch.zeros(3)}

    def update() -> None:
        values["weight"] = 0.9 * values["weight"] + 0.1

    return values, update


def running_case() -> tuple[Any, Callable[[], None]]:
    total = torch.zeros(())
    return total, lambda: total.add_(1) and None


def generator_case() -> tuple[Any, Callable[[], None]]:
    generator = torch.Generator().manual_seed(3)
    return generator, lambda: torch.rand(1, generator=generator).item()


def numpy_case() -> tuple[Any, Callable[[], None]]:
    generator = np.random.default_rng(3)
    return generator, lambda: generator.random()


def old_numpy_case() -> tuple[Any, Callable[[], None]]:
    generator = np.random.RandomState(3)
    return generator, lambda: generator.rand()


def python_case() -> tuple[Any, Callable[[], None]]:
    generator = random.Random(3)
    return generator, lambda: generator.random()


def optimizer_case() -> tuple[Any, Callable[[], None]]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=0.1)

    def step() -> None:
        parameter.sum().backward()
        optimizer.step()

    return optimizer, step


def schedule_case() -> tuple[Any, Callable[[], None]]:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 1)
    return schedule, lambda: (schedule.optimizer.step(), schedule.step())


def loader_case() -> tuple[Any, Callable[[], None]]:
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=2)
    iterator = iter(loader)
    return loader, lambda: next(iterator)


def counting_case() -> tuple[Any, Callable[[], None]]:
    def count() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    numbers = count()
    return numbers, lambda: next(numbers)


CASES = {
    "scaler": scaler_case,
    "module": module_case,
    "averaged copy": copy_case,
    "averages": averages_case,
    "running sum": running_case,
    "torch generator": generator_case,
    "numpy generator": numpy_case,
    "numpy RandomState": old_numpy_case,
    "random.Random": python_case,
    "optimizer": optimizer_case,
    "schedule": schedule_case,
    "loader": loader_case,
    "iterator": counting_case,
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_changes_is_an_error_and_excusing_it_is_not(case: str) -> None:
    script = Script()
    forgotten, use = CASES[case]()
    finding = script.look(use)["forgotten"]
    assert finding.severity == "error"
    assert finding.where.startswith("tests/check/test_untracked.py:")
    assert finding.why
    assert "session.track" in finding.remedy or "session.untracked(forgotten)" in finding.remedy

    script = Script()
    script.tracked.excused.append(forgotten)
    assert "forgotten" not in script.look(use)


@pytest.mark.parametrize("case", ["torch generator", "numpy generator", "numpy RandomState", "random.Random", "averaged copy"])
def test_tracking_what_was_forgotten_ends_the_finding(case: str) -> None:
    script = Script()
    forgotten, use = CASES[case]()
    assert script.look(use)["forgotten"].remedy.startswith("session.track(forgotten=forgotten)")
    script = Script()
    script.tracked.add("forgotten", forgotten)
    assert "forgotten" not in script.look(use)


def test_an_average_in_a_module_is_named_although_the_model_is_tracked(script: Script) -> None:
    average = AveragedModel(script.model)
    found = script.look(lambda: average.update_parameters(script.model))
    assert found["average"].severity == "error"
    assert found["average"].what.startswith("an AveragedModel")


def test_what_hangs_below_an_object_is_named_by_its_path_and_by_the_line_of_the_attribute(script: Script) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.parts = {"noise": np.random.default_rng(1)}

    trainer = Trainer()
    found = script.look(lambda: trainer.parts["noise"].random())
    finding = found["trainer.parts['noise']"]
    assert finding.severity == "error"
    assert finding.remedy.startswith("session.track(trainer_parts_noise=trainer.parts['noise'])")
    line = int(finding.where.rpartition(":")[2])
    assert "self.parts =" in Path(__file__).read_text().splitlines()[line - 1]


def test_a_generator_inside_tracked_data_is_named(script: Script) -> None:
    """A dataset that draws by its own generator: the position is kept, the generator's state is not."""

    class Augmented(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.noise = random.Random(1)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index + self.noise.random()])

    dataset = Augmented()
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))
    script.tracked.add("more", loader)
    found = script.look(lambda: script.tracked.loaders["more"].next() and None)
    assert found["dataset.noise"].severity == "error"
    assert set(found) == {"dataset.noise"}


def test_a_layer_that_the_tracked_model_does_not_own_is_named_alone(script: Script) -> None:
    class Whole(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body
            self.head = nn.BatchNorm1d(4)

    whole = Whole(script.model)
    found = script.look(lambda: whole.head(torch.randn(8, 4)).sum().item())
    assert set(found) == {"whole.head"}
    assert found["whole.head"].severity == "error"


def test_a_tracked_loader_that_the_script_iterates_itself_is_an_error_however_it_does(script: Script) -> None:
    dataset = TensorDataset(torch.arange(40))
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))
    script.tracked.add("batches", loader)
    hidden = zip(range(10), loader, strict=False)
    iterator = iter(loader)
    for use in (lambda: next(hidden) and None, lambda: next(iterator) and None):
        found = script.look(use)
        assert found["batches"].severity == "error"
        assert "step.next_batch('batches')" in found["batches"].remedy
    assert script.look(lambda: script.tracked.loaders["batches"].next() and None) == {}


def test_an_object_that_cannot_be_looked_at_is_a_finding_and_no_exception(script: Script) -> None:
    class Broken(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            raise ValueError("not now")

    broken = Broken()
    found = script.look()
    assert found[""].severity == "error"
    assert not found[""].fatal
    assert "ValueError('not now')" in found[""].what
    assert type(broken) is Broken


def test_looking_keeps_nothing_of_a_step_alive(script: Script) -> None:
    """Up to Python 3.12 a frame keeps the dict of its variables that somebody asked for."""
    loss = torch.ones(3)
    alive = weakref.ref(loss)
    script.look()
    del loss
    assert alive() is None


def test_what_is_made_in_a_shadow_step_and_stays_is_an_error(script: Script) -> None:
    late: dict[str, Any] = {}

    def make() -> None:
        late.setdefault("average", copy.deepcopy(script.model))

    found = script.look(make)
    assert found["late['average']"].severity == "error"
    assert "made in a shadow step" in found["late['average']"].what


# ---------------------------------------------------------------- what is only there


def test_what_did_not_change_is_a_warning(script: Script) -> None:
    idle = nn.Linear(2, 2)
    split = torch.Generator().manual_seed(1)
    validation = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    found = script.look(lambda: list(validation) and None)
    assert {name: finding.severity for name, finding in found.items()} == dict.fromkeys(
        ("idle", "split", "validation"), "warning"
    )
    assert (idle.in_features, split.initial_seed()) == (2, 1)


def test_a_frozen_teacher_a_disabled_scaler_and_a_finished_iterator_are_no_news(script: Script) -> None:
    teacher = nn.Linear(4, 4).requires_grad_(False).eval()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    leftover = iter([1, 2, 3])
    assert script.look(lambda: teacher(torch.ones(4)).sum().item()) == {}
    assert (scaler.is_enabled(), next(leftover)) == (False, 1)


def test_a_loader_of_which_a_part_is_tracked_is_covered_and_its_sampler_too(script: Script) -> None:
    dataset = TensorDataset(torch.arange(20))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = DataLoader(dataset, sampler=sampler, batch_size=2)
    script.tracked.add("more", loader)
    assert script.look(lambda: script.tracked.loaders["more"].next() and None) == {}
    assert sampler is loader.sampler


def test_schedules_inside_a_tracked_one_are_covered(script: Script) -> None:
    warm = LinearLR(script.optimizer, total_iters=1)
    rest = ConstantLR(script.optimizer, total_iters=4)
    schedule = SequentialLR(script.optimizer, [warm, rest], milestones=[1])
    script.tracked.add("schedule", schedule)
    assert script.look(schedule.step) == {}
    assert rest.last_epoch <= warm.last_epoch


def test_wrappers_of_the_tracked_model_are_the_tracked_model(script: Script) -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = script.model
    assert script.look() == {}


# ---------------------------------------------------------------- the text


def test_a_finding_says_what_where_why_and_what_to_write() -> None:
    finding = Finding(
        severity="error",
        kind="scaler",
        name="scaler",
        what="a GradScaler changed",
        where="train.py:3",
        why="the scale",
        remedy="add",
    )
    assert finding.text() == "error: scaler (train.py:3): a GradScaler changed\n    lost with this rank: the scale\n    do: add"
    assert finding.line() == "scaler (train.py:3): a GradScaler changed; lost with this rank: the scale; add"
    assert findings.count([finding], "error") == 1


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("clears_at", ["begin, to None", "begin, to zero", "end"])
def test_gradients_that_every_step_clears_are_silent(script: Script, clears_at: str) -> None:
    script.clear_gradients = {
        "begin, to None": script.optimizer.zero_grad,
        "begin, to zero": lambda: script.optimizer.zero_grad(set_to_none=False),
        "end": lambda: None,
    }[clears_at]
    assert script.look(script.optimizer.zero_grad if clears_at == "end" else lambda: None) == {}


def test_gradients_that_are_carried_into_the_next_step_are_named(script: Script) -> None:
    """Accumulation over several steps: what had been accumulated is emptied when a step is given up."""
    script.clear_gradients = lambda: None
    (finding,) = script.look().values()
    assert (finding.severity, finding.fatal, finding.kind, finding.name) == ("error", True, "gradient", "model/3.bias")
    assert "and 5 more is carried from one step into the next" in finding.what
    assert "inside one `with step:`" in finding.remedy


def test_gradients_that_pile_up_where_no_optimizer_steps_are_no_matter(script: Script) -> None:
    script.optimizer.param_groups[0]["params"] = list(script.model[3].parameters())
    assert script.look() == {}


class Rebinding:
    """An average of the weights whose `load_state_dict` puts other objects in the place of its own, as most do."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.mean = torch.zeros(())

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()
        self.mean.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.mean = state["shadow"], state["mean"]


def test_a_tracked_object_may_bind_other_objects_when_it_is_put_back(script: Script) -> None:
    average = Rebinding(script.model)
    script.tracked.add("average", average)
    assert script.look(lambda: average.update(script.model)) == {}


def test_what_a_tracked_object_forgets_in_its_state_dict_is_named(script: Script) -> None:
    average = Rebinding(script.model)
    average.state_dict = lambda: {"shadow": average.shadow, "mean": torch.zeros(())}  # type: ignore[method-assign]
    average.load_state_dict = lambda state: setattr(average, "shadow", state["shadow"])  # type: ignore[method-assign]
    script.tracked.add("average", average)
    assert list(script.look(lambda: average.update(script.model))) == ["average.mean"]
