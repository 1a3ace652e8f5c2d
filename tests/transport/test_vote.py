"""The vote completes with one result everywhere or breaks; who had no chance of a result knows it."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.mesh import Node, mesh, together
from tests.transport.ranks import Rank, ranks
from tmd_worker import faults
from tmd_worker.core.ballot import Ballot
from tmd_worker.native import library
from tmd_worker.transport import native
from tmd_worker.transport.wire import Disagreement, Kind


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_rank_gets_the_combination_of_all_ballots(size: int) -> None:
    with mesh(size) as made:

        def vote(node: Node) -> Any:
            ballots = [Ballot.single(epoch=0, step=step, plan=3, staged=True, ready=node.rank < 2) for step in range(20)]
            return [node.fabric.vote(ballot, 5.0) for ballot in ballots]

        for results in together(made.nodes, vote):
            for step, (result, sent) in enumerate(results):
                assert sent
                assert result == Ballot(0, 0, step, step, 3, 3, True, min(size, 2))


@pytest.mark.parametrize("in_c", [set(), {0, 3, 4}, {1, 2, 5, 6}, set(range(7))])
def test_members_with_and_without_the_native_core_agree(in_c: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native.vote
    monkeypatch.setattr(native, "vote", lambda table, ballot: whole(table, ballot) if table.rank in in_c else None)
    chance = random.Random(5)
    far = [-(1 << 63), (1 << 63) - 1, -1, 0, 255, 256, 1 << 40]
    rounds = []
    for _ in range(20):
        rounds.append(
            [
                Ballot(0, *(chance.choice(far) for _ in range(5)), chance.random() < 0.8, chance.randrange(1 << 20))
                for _ in range(7)
            ]
        )
    with mesh(7) as made:
        found = together(made.nodes, lambda node: [node.fabric.vote(ballots[node.rank], 10.0) for ballots in rounds])
    expected = [(functools.reduce(Ballot.combine, ballots), True) for ballots in rounds]
    assert found == [expected] * 7


def test_it_is_one_native_call_unless_a_fault_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    core = library.core().library
    assert core is not None
    whole = core.tmd_vote
    monkeypatch.setattr(core, "tmd_vote", lambda *arguments: calls.append(arguments) or whole(*arguments))
    with mesh(3) as made:
        together(made.nodes, lambda node: node.fabric.vote(Ballot.single(epoch=0, step=0), 5.0))
        assert len(calls) == 3
        monkeypatch.setattr(faults, "_faults", [faults.Fault(point="elsewhere", action="kill")])
        together(made.nodes, lambda node: node.fabric.vote(Ballot.single(epoch=0, step=1), 5.0))
        assert len(calls) == 3


def test_another_frame_than_a_ballot_is_a_disagreement() -> None:
    with mesh(2) as made:
        root, leaf = (node.fabric._groups["tmd.session"].table for node in made.nodes)
        assert root is not None
        assert leaf is not None
        leaf.links[0].send(Kind.DATA, 0, bytes(56))
        with pytest.raises(Disagreement, match="got DATA frame 0 of 56 bytes, expected BALLOT frame 0 of 56 bytes"):
            made.nodes[0].fabric.vote(Ballot.single(epoch=0, step=0), 5.0)


@pytest.mark.parametrize("one_host", [False, True])
def test_a_rank_that_dies_while_the_others_vote(one_host: bool) -> None:
    """Tree of four; rank 1, above rank 3, dies before it votes: nobody has a result, and who has sent says so."""

    def body(rank: Rank) -> Any:
        if rank.rank == 1:
            rank.tell("ready")
            rank.hear()
        outcome = rank.fabric.vote(Ballot.single(epoch=0, step=0), 10.0)
        rank.events.wait_poisoned()
        return outcome

    with ranks(4, body, one_host=one_host) as processes:
        victim = next(process for process in processes if process.rank == 1)
        assert victim.hear() == "ready"
        victim.kill()
        outcomes = {process.rank: process.hear() for process in processes if process.rank != 1}
    assert outcomes == {0: (None, False), 2: (None, True), 3: (None, True)}


def test_the_vote_comes_after_the_collectives_that_were_called_before_it() -> None:
    with mesh(3) as made:

        def body(node: Node) -> bool:
            works = [node.world.allreduce([torch.ones(300_000)], dist.AllreduceOptions()) for _ in range(3)]
            result, _ = node.fabric.vote(Ballot.single(epoch=0, step=0), 10.0)
            return result is not None and all(work.is_completed() for work in works)

        assert together(made.nodes, body) == [True] * 3


def test_a_vote_that_nobody_joins_breaks_at_its_deadline() -> None:
    with mesh(3) as made:
        began_s = time.monotonic()
        assert made.nodes[0].fabric.vote(Ballot.single(epoch=0, step=0), 0.2) == (None, False)
        assert time.monotonic() - began_s < 5
        assert made.nodes[0].events.poisoned_epoch == 0


def test_a_leaf_that_has_sent_does_not_know() -> None:
    with mesh(3) as made:
        assert made.nodes[2].fabric.vote(Ballot.single(epoch=0, step=0), 0.2) == (None, True)


@pytest.mark.parametrize(
    ("victim", "point", "decided"),
    [
        (1, "vote.begin", set()),
        (0, "vote.begin", set()),
        (0, "vote.ballot.0", set()),
        (0, "vote.ballot.1", set()),
        (1, "vote.ballot.0", set()),
        (3, "vote.begin", set()),
        (1, "vote.after_up", {0, 2}),
        (3, "vote.after_up", {0, 1, 2}),
        (0, "vote.decided", {0}),
        (0, "vote.child.0", {0, 1, 3}),
        (0, "vote.child.1", {0, 1, 2, 3}),
        (1, "vote.child.0", {0, 1, 2, 3}),
        (2, "vote.decided", {0, 1, 2, 3}),
    ],
)
def test_a_rank_killed_at_every_frame_of_the_vote(victim: int, point: str, decided: set[int]) -> None:
    """Tree of four: 0 has children 1 and 2, 1 has child 3. `decided`: at most these may have a result, and if anybody has one,
    whoever has none says that it sent: it is unknown there, never discarded."""

    def setup(rank: Rank) -> None:
        faults.arm(f'[{{"point": "{point}", "rank": {victim}, "action": "kill"}}]')

    def body(rank: Rank) -> Any:
        result, sent = rank.fabric.vote(Ballot.single(epoch=0, step=0), 10.0)
        rank.events.wait_poisoned()
        return result is not None, sent

    with ranks(4, body, setup=setup) as processes:
        outcomes = {process.rank: process.hear() for process in processes if process.rank != victim}
    having = {rank for rank, (has, _) in outcomes.items() if has}
    # What the root has decided stands, whoever below it dies afterwards; who waits for it may be woken by poison first.
    certain = {0} if (victim, point) in ((1, "vote.child.0"), (2, "vote.decided")) else set()
    assert certain <= having <= decided
    if having:
        assert all(sent for has, sent in outcomes.values() if not has)
