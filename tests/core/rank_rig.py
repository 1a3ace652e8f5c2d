"""A rank's core under test, with a hand on everything around it: the daemon's orders, the links, the main thread."""

from __future__ import annotations

from typing import Any, TypeVar

from tmd.protocol.membership import Install, Member, Membership, Plan, Resolution, Source
from tmd.protocol.rank import Directive
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.instructions import Instruction
from tmd_worker.core.rank import RankCore, Turn, Verdict

WORLD_SIZE = 4

_Kind = TypeVar("_Kind")


def member(incarnation: str) -> Member:
    return Member(incarnation=incarnation, node=f"node-{incarnation}", host="127.0.0.1", port=1)


def table(epoch: int, **replaced: str) -> Membership:
    """Ranks 0 to 3 are held by r0 to r3, save those given as r1="joiner"."""
    names = {rank: replaced.get(f"r{rank}", f"r{rank}") for rank in range(WORLD_SIZE)}
    return Membership(epoch=epoch, members={rank: member(name) for rank, name in names.items()})


def plan(plan_id: int = 1, *, base_epoch: int = 0, leaver: int = 3, epoch: int | None = None) -> Plan:
    successor = table(base_epoch + 1 if epoch is None else epoch, **{f"r{leaver}": "joiner"})
    return Plan(
        plan_id=plan_id, migration_id=f"m{plan_id}", base_epoch=base_epoch, leavers={leaver: f"r{leaver}"}, successor=successor
    )


class Rig:
    """One core. `order` keeps what the daemon wants and sends the whole of it, as the daemon does."""

    def __init__(self, incarnation: str = "r1", rank: int | None = 1) -> None:
        self.core = RankCore(job_id="job", incarnation=incarnation, rank=rank, clock=lambda: 1.0)
        self.wanted: dict[str, Any] = {"rank": rank}
        self.sequence = 0

    def order(self, **changes: Any) -> list[Instruction]:
        self.wanted |= changes
        self.sequence += 1
        return self.core.on_directive(
            Directive(
                job_id="job",
                incarnation=self.core.incarnation,
                generation=1,
                sequence=self.sequence,
                world_size=WORLD_SIZE,
                nproc_per_node=1,
                **self.wanted,
            )
        )

    def running(self) -> Rig:
        """Epoch 0 is live and the main thread is in step 0."""
        self.core.started("127.0.0.1", 1)
        self.order(install=Install(membership=table(0), target_step=0, joining={}, fresh=True))
        self.core.links_ready(0, 4)
        self.order(live_epoch=0)
        self.core.build_begins()
        self.core.warm_up_begins()
        self.core.warm_up_ended()
        assert self.core.boundary()[0].turn is Turn.RUN
        return self

    def standby(self) -> Rig:
        """Warm, without a role, held at its boundary."""
        self.core.started("127.0.0.1", 1)
        self.core.build_begins()
        self.core.warm_up_begins()
        self.core.warm_up_ended()
        assert self.core.boundary()[0].turn is Turn.WAIT
        return self

    def ballot(self, *, ready_leavers: int = 0, staged: bool = True) -> Ballot:
        """What the tree makes of this rank's ballot when all the others agree with it."""
        mine = self.core.vote_begins()
        assert mine is not None
        others = Ballot.single(epoch=mine.epoch_min, step=mine.step_min, plan=mine.plan_min, staged=staged)
        for _ in range(ready_leavers):
            others = others.combine(
                Ballot.single(epoch=mine.epoch_min, step=mine.step_min, plan=mine.plan_min, staged=True, ready=True)
            )
        return mine.combine(others)

    def commit(self, *, ready_leavers: int = 0) -> list[Instruction]:
        """The vote of the step that runs says yes and the step ends; the next boundary is not asked yet."""
        verdict, out = self.core.vote_ended(self.ballot(ready_leavers=ready_leavers), sent=True)
        assert verdict is Verdict.APPLY
        self.core.applied()
        return out

    def unknown(self) -> Rig:
        """The link breaks after this rank's ballot has left."""
        assert self.core.vote_begins() is not None
        self.core.link_broken(self.core.live_epoch, 2, orderly=False, reason="end of file")
        assert self.core.vote_ended(None, sent=True)[0] is Verdict.BLOCK
        return self

    def recover(self, epoch: int, target_step: int, *, lost: int = 2, members: Membership | None = None) -> list[Instruction]:
        """The daemon decides the undecided step and installs the next table, in which `lost` is somebody new."""
        members = members or table(epoch, **{f"r{lost}": "joiner"})
        joining = (
            {} if members.rank_of(f"r{lost}") == lost else {lost: Source(replica_rank=0, record_rank=(lost + 1) % WORLD_SIZE)}
        )
        return self.order(
            poison_epoch=epoch - 1,
            resolution=Resolution(epoch=epoch - 1, target_step=target_step),
            install=Install(membership=members, target_step=target_step, joining=joining),
            plan=None,
            armed=False,
        )

    def go(self, epoch: int) -> list[Instruction]:
        self.core.links_ready(epoch, 4)
        return self.order(live_epoch=epoch)


def of_kind(out: list[Instruction], kind: type[_Kind]) -> list[_Kind]:
    return [instruction for instruction in out if isinstance(instruction, kind)]
