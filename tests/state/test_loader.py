"""No sample is skipped and none is seen twice: over epochs, discarded steps, the warm-up, and a change of process and role."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tmd_worker.state import rng, tree
from tmd_worker.state.errors import DataExhausted, StateMismatch, TrackRefused
from tmd_worker.state.loader import LoaderCursor

#: torchdata 0.11 calls what PyTorch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SIZE = 23
BATCH = 4


class Noisy(Dataset[torch.Tensor]):
    """Every sample carries its index and something drawn from each generator: an augmentation."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(1).item(), np.random.rand(), random.random()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index]) for index in range(SIZE))


class Resumable:
    """Knows its own position, as torchdata's StatefulDataLoader does; told its role."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.set_role(rank, world_size)
        self.position = 0

    def set_role(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        while self.position < SIZE // self.world_size:
            self.position += 1
            yield (self.position - 1) * self.world_size + self.rank
        self.position = 0

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


def distributed(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(SIZE))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=2, sampler=sampler, **options)


def stateful(rank: int, world_size: int, **options: Any) -> StatefulDataLoader[Any]:
    dataset = TensorDataset(torch.arange(SIZE))
    sampler = StatefulDistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=3)
    return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, **options)


def forever(rank: int, world_size: int) -> Iterator[int]:
    index = rank
    while True:
        yield index
        index += world_size


#: Every kind of source, made for a role. Those that can change their role in place come first.
Make = Callable[[int, int], Any]
TELLABLE: dict[str, Make] = {
    "DistributedSampler": distributed,
    "DistributedSampler, workers": lambda r, w: distributed(r, w, num_workers=2),
    "stateful": Resumable,
    "torchdata": stateful,
    "torchdata, workers": lambda r, w: stateful(r, w, num_workers=2),
    "function": lambda r, w: lambda position, rank, world_size: position * world_size + rank,
}
FIXED: dict[str, Make] = {
    "shuffled": lambda r, w: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "own generator": lambda r, w: DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), drop_last=True
    ),
    "workers": lambda r, w: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2),
    "persistent workers": lambda r, w: DataLoader(
        Noisy(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "unbatched": lambda r, w: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "iterable dataset": lambda r, w: DataLoader(Stream(), batch_size=BATCH),
    "list": lambda r, w: [[index] for index in range(7)],
    "iterator": forever,
}
ALL = TELLABLE | FIXED
FAST = {name: make for name, make in ALL.items() if "workers" not in name}


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed(1)


def cursor(make: Make, rank: int = 0, world_size: int = 1) -> LoaderCursor:
    return LoaderCursor("data", make(rank, world_size), rank=rank, world_size=world_size)


def flat(batch: Any) -> tuple[float, ...]:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.flatten().tolist())
    if isinstance(batch, (list, tuple)):
        return tuple(value for part in batch for value in flat(part))
    return (batch,)


def take(source: LoaderCursor, count: int) -> list[tuple[float, ...]]:
    return [flat(source.next()) for _ in range(count)]


@dataclasses.dataclass
class Process:
    """A cursor with generators of its own, since the test's processes share one interpreter."""

    cursor: LoaderCursor
    state: rng.RngState

    def take(self, count: int) -> list[tuple[float, ...]]:
        """One step: draws `count` batches, then uses the RNG as a model would."""
        rng.restore(self.state)
        self.cursor.begin_step()
        batches = take(self.cursor, count)
        batches.append((torch.rand(1).item(), np.random.rand(), random.random()))
        self.state = rng.capture()
        return batches


def process(make: Make, rank: int = 0, world_size: int = 1) -> Process:
    seed(rank)
    return Process(cursor(make, rank, world_size), rng.capture())


def resumed(make: Make, state: bytes, generators: rng.RngState, role: tuple[int, int] = (0, 1)) -> Process:
    """Another process: a fresh object at the position that a record says."""
    torch.manual_seed(1234)
    other = cursor(make, *role)
    before = rng.encode(rng.capture())
    other.load(tree.decode(state, "data"))
    assert rng.encode(rng.capture()) == before
    return Process(other, generators)


# ---------------------------------------------------------------- epochs


def test_epochs_follow_one_another_and_each_sample_comes_once_in_each() -> None:
    per_epoch = 6
    data = cursor(lambda r, w: distributed(0, 2), 0, 2)
    other = cursor(lambda r, w: distributed(1, 2), 1, 2)
    orders = []
    for _ in range(3):
        mine, theirs = take(data, per_epoch), take(other, per_epoch)
        seen = sorted(value for batch in mine + theirs for value in batch)
        assert len(seen) == SIZE + 1  # the sampler pads to a multiple of two
        assert set(seen) == set(range(SIZE))
        orders.append(tuple(mine))
    assert len(set(orders)) == 3


def test_the_epoch_in_which_the_script_begins_is_kept() -> None:
    late, expected = distributed(0, 1), distributed(0, 1)
    late.sampler.set_epoch(4)
    expected.sampler.set_epoch(4)
    assert take(cursor(lambda r, w: late), 3) == [flat(batch) for _, batch in zip(range(3), expected, strict=False)]


def test_it_gives_what_plain_iteration_gives() -> None:
    for name in ("shuffled", "own generator", "unbatched", "iterable dataset", "list"):
        seed(8)
        plain = [flat(batch) for source in [FIXED[name](0, 1)] for _ in range(2) for batch in source]
        seed(8)
        assert take(cursor(FIXED[name]), len(plain)) == plain, name


# ---------------------------------------------------------------- another process


@pytest.mark.parametrize("name", ALL)
def test_another_process_goes_on_at_the_same_position(name: str) -> None:
    """At every position over more than two epochs (a few with workers), to the end of the next."""
    steps = 16
    reference = process(ALL[name])
    positions, batches = [], []
    for _ in range(steps):
        positions.append((tree.encode(reference.cursor.state(), "data"), reference.state))
        batches.append(reference.take(1))
    chosen = range(steps) if name in FAST else (0, 3, 6, 13)
    for start in chosen:
        other = resumed(ALL[name], *positions[start])
        assert [other.take(1) for _ in range(steps - start)] == batches[start:], start


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_course_of_discards_and_moves_gives_the_same_batches(data: st.DataObject) -> None:
    """Steps of several draws, attempts that are given up after some of them, processes that are replaced in between."""
    name = data.draw(st.sampled_from(sorted(set(FAST) - {"iterator"})))
    plan = data.draw(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2), st.booleans()), max_size=8))
    calm = process(FAST[name])
    expected = [calm.take(draws) for draws, _, _ in plan]

    stormy = process(FAST[name])
    got = []
    for draws, attempts, moves in plan:
        if moves:
            stormy = resumed(FAST[name], tree.encode(stormy.cursor.state(), "data"), stormy.state)
        before = stormy.state
        rng.restore(before)
        stormy.cursor.begin_step()
        for drawn in attempts:
            rng.restore(before)
            take(stormy.cursor, min(drawn, draws))
            torch.rand(2)
            stormy.cursor.rollback()
        rng.restore(before)
        batches = take(stormy.cursor, draws)
        batches.append((torch.rand(1).item(), np.random.rand(), random.random()))
        stormy.state = rng.capture()
        got.append(batches)
    assert got == expected


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("attempts", [1, 2])
def test_each_attempt_begins_the_step_anew_and_the_rng_goes_on_as_if_the_batch_had_been_drawn(attempts: int, name: str) -> None:
    """As the loop does it: a snapshot and `begin_step` for every attempt. The next step's noise is that of a calm run."""
    calm = process(FAST[name])
    expected = [calm.take(2) for _ in range(4)]

    stormy = process(FAST[name])
    got = [stormy.take(2)]
    before = stormy.state
    for drawn in range(attempts):
        rng.restore(before)
        stormy.cursor.begin_step()
        take(stormy.cursor, 1 + drawn)
        stormy.cursor.rollback()
    got += [stormy.take(2) for _ in range(3)]
    assert got == expected


@pytest.mark.parametrize("name", FAST)
def test_batches_that_only_a_discarded_attempt_drew_come_next(name: str) -> None:
    """The attempt that counts draws fewer: what is left belongs to the next step, also in a record."""
    calm = cursor(FAST[name])
    seed(1)
    expected = [batch[:1] for batch in take(calm, 6)]
    seed(1)
    data = cursor(FAST[name])
    take(data, 1)
    data.begin_step()
    take(data, 3)
    data.rollback()
    got = take(data, 1)
    state = tree.encode(data.state(), "data")
    data.begin_step()
    got += take(data, 4)
    assert [batch[:1] for batch in got] == expected[1:]

    other = cursor(FAST[name])
    other.load(tree.decode(state, "data"))
    assert [batch[:1] for batch in take(other, 2)] == expected[2:4]


# ---------------------------------------------------------------- warm-up


@pytest.mark.parametrize("name", ALL)
def test_the_warm_up_takes_nothing(name: str) -> None:
    fresh = process(ALL[name])
    expected = [fresh.take(1) for _ in range(8)]
    warm = process(ALL[name])
    before = warm.state
    warm.cursor.hold()
    warm.take(1)
    warm.take(1)
    warm.cursor.give_back()
    warm.state = before
    assert [warm.take(1) for _ in range(8)] == expected


@pytest.mark.parametrize("name", TELLABLE)
def test_a_standby_that_warmed_up_in_another_role_sees_exactly_the_lost_ranks_samples(name: str) -> None:
    """Three ranks; rank 1 is lost after any number of steps and a standby, warm as rank 2, takes its place."""
    world_size, steps = 3, 9
    undisturbed = [take(cursor(TELLABLE[name], rank, world_size), steps) for rank in range(world_size)]
    for lost_after in range(steps) if "workers" not in name else (0, 2, 5):
        lost = cursor(TELLABLE[name], 1, world_size)
        seen = take(lost, lost_after)
        record = tree.encode(lost.state(), "data")

        standby = cursor(TELLABLE[name], world_size - 1, world_size)
        standby.hold()
        take(standby, 2)
        standby.give_back()
        assert standby.changes_role
        standby.set_role(1, world_size)
        standby.load(tree.decode(record, "data"))
        seen += take(standby, steps - lost_after)
        assert seen == undisturbed[1]


def test_a_whole_epoch_is_seen_once_by_all_ranks_together_across_a_change_of_role() -> None:
    world_size, per_epoch = 4, 3
    cursors = [cursor(distributed, rank, world_size) for rank in range(world_size)]
    seen = [value for data in cursors for batch in take(data, 2) for value in batch]
    standby = cursor(distributed, 3, world_size)
    standby.set_role(0, world_size)
    standby.load(tree.decode(tree.encode(cursors[0].state(), "data"), "data"))
    cursors[0] = standby
    seen += [value for data in cursors for batch in take(data, per_epoch - 2) for value in batch]
    assert len(seen) == SIZE + 1
    assert set(seen) == set(range(SIZE))


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_source_that_cannot_be_told_its_role_is_refused_by_name(name: str) -> None:
    data = cursor(FIXED[name], 2, 3)
    data.set_role(2, 3)
    assert not data.changes_role
    with pytest.raises(TrackRefused, match=r"data was made for rank 2 and cannot become that of rank 1.*set_role"):
        data.set_role(1, 3)


def test_a_sampler_of_another_group_than_the_job_is_not_touched() -> None:
    data = cursor(lambda r, w: distributed(0, 2), 2, 4)
    assert not data.changes_role


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_source_that_no_standby_could_take_over_is_refused_before_the_first_step(name: str) -> None:
    cursor(FIXED[name], 0, 1).require_movable()
    with pytest.raises(
        TrackRefused, match=r"cannot track data: nothing tells this \w+ which rank it serves.*set_role"
    ) as refused:
        cursor(FIXED[name], 0, 2).require_movable()
    assert ("an iterator cannot start again" in str(refused.value)) == (name == "iterator")


@pytest.mark.parametrize("name", TELLABLE)
def test_a_source_that_can_be_told_its_role_is_not_refused(name: str) -> None:
    cursor(TELLABLE[name], 0, 2).require_movable()


# ---------------------------------------------------------------- refusals


def test_a_source_that_has_ended_says_so() -> None:
    data = cursor(lambda r, w: iter([1, 2]))
    take(data, 2)
    with pytest.raises(DataExhausted, match="data: it has ended and cannot start again"):
        data.next()


def test_a_source_without_a_single_batch_says_so() -> None:
    with pytest.raises(DataExhausted, match="no batch at all in epoch 0"):
        cursor(lambda r, w: []).next()


def test_an_iterator_does_not_go_back() -> None:
    data = cursor(forever)
    state = data.state()
    take(data, 3)
    with pytest.raises(StateMismatch, match="cannot go back"):
        data.load(state)


def test_a_position_beyond_the_data_is_refused() -> None:
    long, short = cursor(lambda r, w: list(range(9))), cursor(lambda r, w: list(range(4)))
    take(long, 7)
    with pytest.raises(StateMismatch, match="batch 7 of epoch 0, but only 4 are to be had here"):
        short.load(long.state())


@pytest.mark.parametrize(
    "state", [None, {}, {"kind": "repeatable", "at": b"", "then": 0}, {"kind": "stateful", "at": b"", "then": 0}]
)
def test_a_malformed_position_is_refused(state: Any) -> None:
    with pytest.raises(StateMismatch, match="data"):
        cursor(FIXED["list"]).load(state)


def test_a_script_that_draws_by_its_own_hand_is_rolled_back() -> None:
    class Hand:
        position = 0

        def __next__(self) -> int:
            self.position += 1
            return self.position

        def state_dict(self) -> Any:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

    source = Hand()
    data = LoaderCursor("data", source, rank=0, world_size=1)
    next(source)
    data.begin_step()
    next(source), next(source)
    data.rollback()
    assert next(source) == 2
