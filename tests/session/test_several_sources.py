"""A joiner whose state came from two survivors ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

from tests.session.conftest import Killing, Lab
from tests.session.outcome import Outcome

SCRIPT = Path(__file__).with_name("wide.py")
RANKS, STEPS = 4, 3


def test_a_state_of_many_chunks_comes_from_several_ranks_bit_for_bit(lab: Lab, kill: Killing) -> None:
    with lab.cluster(script=SCRIPT, nodes=RANKS, steps=STEPS) as cluster:
        assert cluster.run(timeout_s=120).exit_code == 0, cluster.report()
    reference = Outcome.of(cluster.folder)
    assert len(set(reference.digests)) == RANKS
    with lab.cluster(script=SCRIPT, nodes=RANKS, standbys=1, steps=STEPS, faults=kill("forward", rank=1, step=1)) as cluster:
        assert cluster.run(timeout_s=120).exit_code == 0, cluster.report()
        assert cluster.faults_fired() == 1
        (view,) = cluster.core.migrations()
        assert view.record.handoffs is not None
        handoff = view.record.handoffs[1]
        report = cluster.report()
    Outcome.of(cluster.folder).assert_same_as(reference)
    assert {source.rank for source in handoff.sources} <= {0, 2, 3}
    assert len(handoff.sources) > 1, report
    assert {source.node for source in handoff.sources} <= {"n0", "n2", "n3"}
    assert sum(source.size_bytes for source in handoff.sources) == sum(handoff.bytes_by_transport.values())
    assert handoff.source == ", ".join(f"rank {source.rank} on {source.node}" for source in handoff.sources)
