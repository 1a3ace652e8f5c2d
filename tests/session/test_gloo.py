"""Moves and losses with gloo carrying the collectives: the same ends, bit for bit, as with tmd's own links."""

from __future__ import annotations

import pytest

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome
from tests.session.test_planned import GATE, JOINER, LEAVER, STEPS, move_rank_1
from tests.session.training import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS, ids="+".join)
def test_a_planned_move_is_bit_identical(variant: tuple[str, ...], lab: Lab) -> None:
    reference = lab.reference(*variant, nodes=3, steps=STEPS, transport="gloo")
    with lab.cluster(*variant, nodes=3, standbys=1, steps=STEPS, gate=GATE, transport="gloo") as cluster:
        migration_id = move_rank_1(cluster)
        assert cluster.run().exit_code == 0, cluster.report()
        migration = cluster.migration(migration_id)
        assert (migration.state, migration.steps_redone) == ("done", 0)
    Outcome.of(cluster.folder).assert_same_as(reference)


@pytest.mark.parametrize("moment", ["step.begin", "forward", "backward", "vote.begin", "vote.decided", "optimizer.begin", "tail"])
def test_a_rank_killed_at_any_moment_of_a_step_is_replaced_bit_for_bit(moment: str, lab: Lab, kill: Killing) -> None:
    reference = lab.reference("batchnorm", nodes=4, transport="gloo")
    with lab.cluster("batchnorm", nodes=4, standbys=1, faults=kill(moment, rank=1, step=3), transport="gloo") as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@pytest.mark.parametrize("incarnation", [JOINER, LEAVER])
def test_whoever_is_lost_during_a_move_is_replaced(incarnation: str, lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=3, steps=STEPS, transport="gloo")
    moment = "staged" if incarnation == JOINER else "vote.decided"
    faults = [
        {"point": moment, "incarnation": incarnation, "action": "kill", **({} if incarnation == JOINER else {"step": GATE})}
    ]
    shape = {"nodes": 3, "standbys": 2, "steps": STEPS, "gate": GATE, "faults": faults, "transport": "gloo"}
    with lab.cluster("batchnorm", **shape) as cluster:  # type: ignore[arg-type]
        cluster.stand_at_gate(standbys=2, step=GATE)
        if incarnation == JOINER:
            cluster.migrate(1)
            cluster.run_until(lambda: cluster.faults_fired() == 1)
        else:
            cluster.stage_move(1)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)
