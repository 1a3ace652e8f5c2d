"""Every sample is seen once in each epoch, in the order of a run that nothing disturbs, over a planned move and a loss."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.session import sampling
from tests.session.conftest import Killing, Lab
from tests.session.sampling import BATCH, KINDS, SIZE
from tests.session.test_offspring import gone

#: torchdata 0.11 calls what PyTorch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SCRIPT = Path(sampling.__file__)
RANKS = 3
PER_EPOCH = SIZE // RANKS // BATCH
STEPS = PER_EPOCH + 6
MOVED, GATE = 1, 3
LOST, LOST_IN_STEP = 2, PER_EPOCH + 2
#: With gloo only those whose workers are forked from a rank, and take copies of gloo's sockets along.
CASES = [
    *(("delta", kind) for kind in KINDS if kind != "iterator"),
    *(("gloo", kind) for kind in KINDS if kind.endswith("workers")),
]


def rows(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """By rank and step. A step that was logged twice must read the same."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            known = found.setdefault((row["rank"], row["step"]), row)
            assert known["samples"] == row["samples"]
    return found


def undisturbed(kind: str, rank: int) -> Iterator[list[int]]:
    """The batches of one rank as plain iteration gives them, epoch after epoch."""
    if kind == "function":
        yield from ([int(i) for i in sampling.by_position(n, rank, RANKS)[:, 0]] for n in itertools.count())
    source = KINDS[kind](rank, RANKS)
    for epoch in itertools.count():
        if hasattr(getattr(source, "sampler", None), "set_epoch"):
            source.sampler.set_epoch(epoch)
        yield from ([int(i) for i in batch[:, 0]] for batch in source)


@pytest.mark.parametrize(("transport", "kind"), CASES)
def test_no_sample_is_skipped_and_none_seen_twice(kind: str, lab: Lab, kill: Killing) -> None:
    """1. rank 1 is moved in step 3. 2. rank 2 is lost in step 12, in the second epoch. 3. the run goes to its end."""
    faults = kill("backward", rank=LOST, step=LOST_IN_STEP)
    cluster = lab.cluster(kind, script=SCRIPT, nodes=RANKS, standbys=2, steps=STEPS, gate=GATE, faults=faults)
    with cluster:
        cluster.stand_at_gate(standbys=2, step=GATE)
        migration_id = cluster.stage_move(MOVED)
        cluster.open_gate()
        assert cluster.run(timeout_s=120).exit_code == 0, cluster.report()
        assert cluster.migration(migration_id).state == "done"
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    seen = rows(cluster.folder)
    assert seen.keys() == set(itertools.product(range(RANKS), range(STEPS)))
    for rank in range(RANKS):
        expected = list(itertools.islice(undisturbed(kind, rank), STEPS))
        assert [seen[rank, step]["samples"] for step in range(STEPS)] == expected
    first_epoch = [i for rank in range(RANKS) for step in range(PER_EPOCH) for i in seen[rank, step]["samples"]]
    assert sorted(first_epoch) == list(range(SIZE))
    makers = {pid for row in seen.values() for pid in row["makers"]}
    assert len(makers) > RANKS
    assert all(gone(pid) for pid in makers)


def test_data_that_no_standby_could_take_over_is_refused_before_the_first_step(lab: Lab) -> None:
    with lab.cluster("iterator", script=SCRIPT, nodes=2, steps=4) as cluster:
        over = cluster.run()
        assert over.exit_code == 1, cluster.report()
    assert "cannot track data: nothing tells this list_iterator which rank it serves" in over.reason
    assert "an iterator cannot start again: track a function data(position, rank)" in over.reason
    assert not rows(cluster.folder)


def test_the_noise_that_a_sample_is_made_with_is_that_of_an_undisturbed_run(lab: Lab, kill: Killing) -> None:
    """An augmentation draws from the rank's generator: it must go on where the lost rank's stood."""

    def run(faults: list[dict[str, Any]], standbys: int) -> dict[tuple[int, int], list[str]]:
        cluster = lab.cluster("loader", script=SCRIPT, nodes=2, standbys=standbys, steps=8, faults=faults)
        with cluster:
            assert cluster.run().exit_code == 0, cluster.report()
            assert cluster.faults_fired() == len(faults)
        return {key: row["noise"] for key, row in rows(cluster.folder).items()}

    assert run(kill("forward", rank=1, step=4), 1) == run([], 0)
