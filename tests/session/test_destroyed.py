"""A group that the script has destroyed costs nothing any more, and stands in the way of no move and no recovery."""

from __future__ import annotations

import pytest

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome
from tests.session.test_many_moves import ENDLESS, Usage, growth
from tests.session.training import DESTROYED_IN
from tests.transports import BOTH

STEPS = 10
#: Caches fill up first.
SETTLED_AFTER = 50
LAST = 170


@BOTH
@pytest.mark.parametrize("gate", [DESTROYED_IN, DESTROYED_IN + 1], ids=["while the move is staged", "before the move"])
def test_a_move_and_a_loss_after_a_group_was_destroyed_are_bit_identical(gate: int, lab: Lab, kill: Killing) -> None:
    """Each joiner's script has made the group, too, and never comes to the step in which it is destroyed."""
    reference = lab.reference("destroys", nodes=3, steps=STEPS)
    faults = kill("forward", rank=2, step=7)
    with lab.cluster("destroys", nodes=3, standbys=2, steps=STEPS, gate=gate, faults=faults) as cluster:
        cluster.stand_at_gate(standbys=2, step=gate)
        migration_id = cluster.stage_move(1)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.migration(migration_id).state == "done"
        assert cluster.faults_fired() == 1
        assert [len(cluster.started(rank)) for rank in range(3)] == [1, 2, 2]
        assert cluster.core.job("job").record.epoch == 2
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
def test_a_group_in_every_step_leaves_nothing_behind(lab: Lab) -> None:
    with lab.cluster("passing", nodes=2, steps=ENDLESS) as cluster:
        cluster.run_until(lambda: cluster.step_of(0) > SETTLED_AFTER)
        usage = {rank: Usage(cluster.member(rank).pid) for rank in range(2)}
        for step in range(SETTLED_AFTER, LAST, 4):
            cluster.run_until(lambda step=step: cluster.step_of(0) > step)  # type: ignore[misc]
            for each in usage.values():
                each.sample()
    for rank, held in usage.items():
        # what is just being given back comes and goes; 120 groups kept would be 240 descriptors and 120 threads
        assert growth(held.descriptors) < 8, (rank, held.descriptors)
        assert growth(held.threads) < 8, (rank, held.threads)
        assert growth(held.resident_bytes) < 4 << 20, (rank, held.resident_bytes)
