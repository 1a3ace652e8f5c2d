"""A rank is moved while it trains: the stayers notice nothing, and any trouble on the way ends as one would wish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.session.conftest import Lab
from tests.session.harness import Cluster
from tests.session.outcome import Outcome
from tests.session.training import VARIANTS, Net
from tests.transports import BOTH
from tmd.core.settings import CoreSettings

GATE = 3
STEPS = 10
LEAVER = "job.2"
JOINER = "job.4"
#: Parameters and the two moments of AdamW, in single precision.
STATE_BYTES = 3 * 4 * sum(parameter.numel() for parameter in Net(set()).parameters())


def move_rank_1(cluster: Cluster, standbys: int = 1) -> str:
    """Asks for the move while the ranks stand at the gate, and opens the gate once the flip may come."""
    cluster.stand_at_gate(standbys=standbys, step=GATE)
    migration_id = cluster.stage_move(1)
    cluster.open_gate()
    return migration_id


@BOTH
@pytest.mark.parametrize("variant", VARIANTS, ids="+".join)
def test_a_planned_move_is_bit_identical(variant: tuple[str, ...], lab: Lab) -> None:
    reference = lab.reference(*variant, nodes=3, steps=STEPS)
    with lab.cluster(*variant, nodes=3, standbys=1, steps=STEPS, gate=GATE) as cluster:
        migration_id = move_rank_1(cluster)
        assert cluster.run().exit_code == 0, cluster.report()
        migration = cluster.migration(migration_id)
        assert (migration.state, migration.steps_redone) == ("done", 0)
        assert cluster.exit_code_of(LEAVER) == 0
    Outcome.of(cluster.folder).assert_same_as(reference)


def test_only_the_joiner_is_told_of_a_role(lab: Lab) -> None:
    with lab.cluster(nodes=3, standbys=1, steps=STEPS, gate=GATE) as cluster:
        move_rank_1(cluster)
        assert cluster.run().exit_code == 0, cluster.report()
        assert [path.name for path in cluster.folder.glob("role-*.txt")] == ["role-1.txt"]


@BOTH
def test_stayers_keep_their_processes_and_every_link_among_them(lab: Lab) -> None:
    with lab.cluster("links", nodes=4, standbys=1, steps=STEPS, gate=GATE) as cluster:
        migration_id = move_rank_1(cluster)
        assert cluster.run().exit_code == 0, cluster.report()
        assert [cluster.counters(rank)["stayer_links_reopened"] for rank in (0, 2, 3)] == [0, 0, 0]
        migration = cluster.migration(migration_id)
        assert (migration.stayer_links_reopened, migration.bytes_moved) == (0, cluster.counters(1)["state_bytes"])
        assert migration.bytes_moved > STATE_BYTES
    for rank in (0, 2, 3):
        rows = links_by_step(cluster.folder, rank)
        assert sorted(rows) == list(range(STEPS))
        first, last = rows[0], rows[STEPS - 1]
        assert first["pid"] == last["pid"]
        assert kept(first) == kept(last)
        assert {tuple(link[:2]) for link in first["links"]} == {tuple(link[:2]) for link in last["links"]}
        replaced = [link for link in first["links"] if link[1] == 1]
        assert all(link not in last["links"] for link in replaced)


def links_by_step(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    lines = (folder / f"links-{rank}.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def kept(row: dict[str, Any]) -> list[Any]:
    """The links of a rank that do not lead to rank 1."""
    return [link for link in row["links"] if link[1] != 1]


@BOTH
@pytest.mark.parametrize("moment", ["staged", "state.loading", "state.loaded", "step.begin"])
def test_a_joiner_that_is_lost_costs_only_the_joiner(moment: str, lab: Lab) -> None:
    """Before the flip the leaver goes on; after it the leaver, still at its boundary, is used again or another one joins."""
    reference = lab.reference("batchnorm", nodes=3, steps=STEPS)
    faults = [{"point": moment, "incarnation": JOINER, "action": "kill"}]
    with lab.cluster("batchnorm", nodes=3, standbys=2, steps=STEPS, gate=GATE, faults=faults) as cluster:
        cluster.stand_at_gate(standbys=2, step=GATE)
        if moment == "staged":
            cluster.migrate(1)
            cluster.run_until(lambda: cluster.faults_fired() == 1)
        else:
            cluster.stage_move(1)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
@pytest.mark.parametrize("moment", ["forward", "vote.begin", "vote.decided", "optimizer.end", "tail", "boundary", "frozen"])
def test_a_leaver_that_is_lost_is_an_unplanned_loss(moment: str, lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=3, steps=STEPS)
    faults = [{"point": moment, "incarnation": LEAVER, "step": GATE, "action": "kill"}]
    with lab.cluster("batchnorm", nodes=3, standbys=2, steps=STEPS, gate=GATE, faults=faults) as cluster:
        move_rank_1(cluster, standbys=2)
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        assert cluster.core.job("job").record.approximations == ()
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
def test_a_stayer_without_a_free_descriptor_keeps_its_process_and_the_move_is_called_off(lab: Lab) -> None:
    reference = lab.reference("starved", nodes=3, steps=STEPS)
    settings = CoreSettings(migration_attempts=1)
    with lab.cluster("starved", nodes=3, standbys=1, steps=STEPS, gate=GATE, settings=settings) as cluster:
        cluster.stand_at_gate(standbys=1, step=GATE)
        migration_id = cluster.migrate(1)
        cluster.run_until(lambda: cluster.migration(migration_id).state == "aborted")
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert [cluster.exit_code_of(f"job.{number}") for number in (1, 2, 3)] == [0, 0, 0]
        assert "Too many open files); look for files" in cluster.report()
    Outcome.of(cluster.folder).assert_same_as(reference)


@BOTH
def test_a_stayer_that_is_lost_at_the_flip_does_not_split_the_job(lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=3, steps=STEPS)
    faults = [{"point": "flip", "rank": 2, "action": "kill"}]
    with lab.cluster("batchnorm", nodes=3, standbys=2, steps=STEPS, gate=GATE, faults=faults) as cluster:
        move_rank_1(cluster, standbys=2)
        assert cluster.run().exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
    Outcome.of(cluster.folder).assert_same_as(reference, unlogged=1)


@BOTH
def test_a_whole_node_moves_with_one_flip(lab: Lab) -> None:
    reference = lab.reference("batchnorm", nodes=2, per_node=2, steps=STEPS)
    with lab.cluster("batchnorm", nodes=2, per_node=2, standbys=1, steps=STEPS, gate=GATE) as cluster:
        cluster.stand_at_gate(standbys=2, step=GATE)
        cluster.drain("n1")
        cluster.run_until(lambda: cluster.core.job("job").record.armed)
        cluster.open_gate()
        assert cluster.run().exit_code == 0, cluster.report()
        assert "n1" in cluster.released
    Outcome.of(cluster.folder).assert_same_as(reference)
