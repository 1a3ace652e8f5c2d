"""The commit vote on the wire: ballots go up the tree and are combined, the result comes down.

Contract: whoever returns a result knows that every rank has sent its ballot. A break before the own ballot left proves that
nobody can have a result; after that it is unknown.
"""

from __future__ import annotations

import dataclasses

from tmd_worker import faults
from tmd_worker.core.ballot import BALLOT_BYTES, Ballot, tree_children, tree_parent
from tmd_worker.transport import native
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.link import LinkEnded
from tmd_worker.transport.wire import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class VoteOutcome:
    """`result` None: it broke. `broken`: the link that ended, which must be reported even when there is a result."""

    result: Ballot | None
    sent: bool
    broken: LinkEnded | None = None


def run_vote(table: LinkTable, ballot: Ballot, deadline_s: float) -> VoteOutcome:
    """In the caller's thread, which holds the links meanwhile."""
    for link in table.links.values():
        link.set_timeout(deadline_s)
    table.hold()
    try:
        return _vote_natively(table, ballot) or _vote(table, ballot)
    finally:
        table.release()


def _vote_natively(table: LinkTable, ballot: Ballot) -> VoteOutcome | None:
    """In one call; None if it has to be done here, frame by frame."""
    packed = bytearray(ballot.pack())
    voted = native.vote(table, packed)
    if voted is None:
        return None
    broken, sent, broken_below = voted
    if broken is not None:
        return VoteOutcome(None, sent, broken)
    return VoteOutcome(Ballot.unpack(packed), sent, broken_below)


def _vote(table: LinkTable, ballot: Ballot) -> VoteOutcome:
    epoch = table.epoch
    children = [table.links[child] for child in tree_children(table.rank, table.size)]
    parent_rank = tree_parent(table.rank)
    sent = False
    raises_flag = ballot.ready_leavers > 0
    try:
        faults.point("vote.begin")
        for number, child in enumerate(children):
            ballot = ballot.combine(Ballot.unpack(child.receive_small(Kind.BALLOT, epoch, BALLOT_BYTES)))
            faults.point(f"vote.ballot.{number}")
        if parent_rank is None:
            if raises_flag:
                faults.point("flag.raised")
        else:
            parent = table.links[parent_rank]
            sent = True
            parent.send(Kind.BALLOT, epoch, ballot.pack())
            faults.point("vote.after_up")
            if raises_flag:
                faults.point("flag.raised")
            ballot = Ballot.unpack(parent.receive_small(Kind.RESULT, epoch, BALLOT_BYTES))
    except LinkEnded as ended:
        return VoteOutcome(None, sent, ended)
    faults.point("vote.decided")
    broken = None
    packed = ballot.pack()
    for number, child in enumerate(children):
        try:
            child.send(Kind.RESULT, epoch, packed)
        except LinkEnded as ended:
            broken = ended  # the result stands; the others below learn it from the resolution
        faults.point(f"vote.child.{number}")
    return VoteOutcome(ballot, True, broken)
