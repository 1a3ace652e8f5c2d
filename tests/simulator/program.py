"""The main thread of a rank as a generator: build, warm-up, then boundary, step, vote, apply, tail, and the last vote.

It yields a delay in seconds, the End whose next frame it needs, or None to sleep until woken. Poison wakes it from each.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from tests.simulator import model
from tests.simulator.links import End, Frame
from tmd.protocol.membership import buddy_of
from tmd_worker.core.ballot import Ballot, tree_children, tree_parent
from tmd_worker.core.rank import Admission, Turn, Verdict

if TYPE_CHECKING:
    from tests.simulator.rank import SimRank

Wait = float | End | None
EXIT_DISCARDED_BUILD = 71


class MainThread:
    """Runs the program of one rank; resumed by timers, frames and wake-ups."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.world = rank.world
        self._program = self._run()
        self._waits_for: Wait = 0.0
        self._ticket = 0
        self._running = False
        #: Inside an attempt at a step (not at a boundary): its number.
        self.attempt: int | None = None
        #: The first step in an epoch sends the record that the buddy may lack.
        self._begun_epoch = -1

    # ---------------------------------------------------------------- waiting

    def resume(self, ticket: int = 0) -> None:
        if ticket != self._ticket or not self.rank.alive:
            return
        self._ticket += 1
        self._running = True
        try:
            self._waits_for = next(self._program)
        except StopIteration:
            self._waits_for = None
            return
        finally:
            self._running = False
        if isinstance(self._waits_for, float):
            self.world.after(self._waits_for, self.rank, self.resume, self._ticket)

    def wake(self) -> None:
        """From the core: something changed. Only who sleeps until woken, or waits for a frame, looks again."""
        if not self._running and not isinstance(self._waits_for, float):
            self.resume(self._ticket)

    def frame_arrived(self, end: End) -> None:
        if self._waits_for is end and not self._running:
            self.resume(self._ticket)

    # ---------------------------------------------------------------- the program

    def _run(self) -> Generator[Wait, None, None]:
        rank, core, world = self.rank, self.rank.core, self.world
        rank.perform(core.started(rank.machine.name, 1))
        if core.rank is None:
            rank.perform(core.build_begins())
            yield world.pace("build")
        else:
            while core.live_epoch < 0:
                yield None
            rank.perform(core.build_begins())
            yield world.pace("build")
            built = yield from self._all_reduce(model.build_contribution(world.seed, core.rank), core.live_epoch, 0)
            if built is None:
                rank.die(EXIT_DISCARDED_BUILD)
                return
            private = model.first_private(world.seed, core.rank)
            rank.state = model.TrainingState(0, model.first_params(built), private)
            rank.own_records[0] = private
        rank.perform(core.warm_up_begins())
        yield world.pace("warm_up")
        rank.perform(core.warm_up_ended())
        rank.maybe_linked()
        yield from self._steps()
        rank.perform(core.finished())
        yield world.pace("finish")
        rank.die(0)

    def _steps(self) -> Generator[Wait, None, None]:
        """Returns when the last vote has said yes."""
        rank, core, world = self.rank, self.rank.core, self.world
        while True:
            boundary, out = core.boundary()
            rank.perform(out)
            if not rank.alive:
                return
            if boundary.turn is Turn.WAIT:
                yield None
                continue
            world.checks.step_begins(rank, boundary)
            self.attempt = boundary.step
            last = boundary.step == world.total_steps
            done = yield from self._attempt(boundary.step, boundary.epoch, last=last)
            self.attempt = None
            rank.maybe_linked()
            if done and last:
                return
            if not done:
                core.discarded()

    def _attempt(self, step: int, epoch: int, *, last: bool) -> Generator[Wait, None, bool]:
        """One try at a step. False: discarded, the private state is as it was at the boundary."""
        rank, core, world = self.rank, self.rank.core, self.world
        state = rank.state
        assert state is not None
        assert state.step == step
        before = state.private
        given: tuple[int, ...] = ()
        if epoch != self._begun_epoch:
            self._begun_epoch = epoch
            self._send_record("resync", epoch, step, before)
        if not last:
            yield world.pace("forward")
            state.private = model.draw(before)
            mine = model.contribution(state.params, state.private, self._role)
            reduced = yield from self._all_reduce(mine, epoch, step)
            if reduced is None:
                state.private = before
                return False
            given = reduced
        verdict = yield from self._vote(step, epoch, last=last)
        if verdict is Verdict.DISCARD:
            state.private = before
            return False
        if last:
            return True
        yield world.pace("slow_apply" if world.random.random() < 0.1 else "apply")
        world.checks.step_applied(rank, epoch, step, state, given)
        state.params, state.step = model.apply(state.params, given), step + 1
        core.applied()
        yield world.pace("slow_tail" if world.random.random() < 0.12 else "tail")
        return True

    @property
    def _role(self) -> int:
        assert self.rank.core.rank is not None
        return self.rank.core.rank

    # ---------------------------------------------------------------- communication

    def _over(self, epoch: int) -> bool:
        return epoch <= self.rank.core.poisoned_epoch

    def _receive(self, kind: str, peer: int, epoch: int) -> Generator[Wait, None, Frame | None]:
        """None: poisoned."""
        while not self._over(epoch):
            end = self.rank.live.get((kind, peer))
            assert end is not None
            if end.inbox:
                frame = end.inbox.popleft()
                self.world.checks.frame_heard(self.rank, end, frame, epoch)
                return frame
            yield end
        return None

    def _send(self, kind: str, peer: int, frame: Frame) -> None:
        end = self.rank.live.get((kind, peer))
        if end is not None:
            end.send(frame)

    def _all_reduce(self, mine: int, epoch: int, step: int) -> Generator[Wait, None, tuple[int, ...] | None]:
        """Everybody's contribution by way of the ring, in rank order. None: the attempt is over."""
        in_autograd = self.world.random.random() < 0.5
        if self.rank.core.admit(in_autograd=in_autograd) is not Admission.PROCEED:
            return None
        size, role = self.world.world_size, self._role
        parts = {role: mine}
        for hop in range(size - 1):
            passed = (role - hop) % size
            self._send(
                "ring", (role + 1) % size, Frame("part", epoch, step, role, self.rank.incarnation, (passed, parts[passed]))
            )
            frame = yield from self._receive("ring", (role - 1) % size, epoch)
            if frame is None:
                return None
            owner, value = frame.value
            parts[owner] = value
        return tuple(parts[rank] for rank in range(size))

    def _send_record(self, kind: str, epoch: int, step: int, private: int) -> None:
        world = self.world
        buddy = buddy_of(self._role, world.world_size, world.nproc_per_node)
        self._send("buddy", buddy, Frame(kind, epoch, step, self._role, self.rank.incarnation, private))

    # ---------------------------------------------------------------- the vote

    def _vote(self, step: int, epoch: int, *, last: bool) -> Generator[Wait, None, Verdict]:
        rank, core, state, world = self.rank, self.rank.core, self.rank.state, self.world
        assert state is not None
        if not last:
            rank.keep_record(rank.own_records, step + 1, state.private)
            kind = "resync" if world.cores.votes_without_record else "record"
            self._send_record(kind, epoch, step + 1, state.private)
            if not world.cores.votes_without_record:
                record = yield from self._receive("buddy", rank.ward, epoch)
                if record is None:
                    return Verdict.DISCARD
                rank.keep_record(rank.ward_records, step + 1, record.value)
                world.checks.record_kept(rank, epoch, step + 1)
        ballot = core.vote_begins(last=last)
        if ballot is None:
            return Verdict.DISCARD
        self.world.faults.point("vote", rank)
        self._sent = False
        result = yield from self._tree(ballot, epoch, step)
        verdict, out = core.vote_ended(result, sent=self._sent)
        self.world.checks.vote_ended(rank, epoch, step, result)
        rank.perform(out)
        if core.flip is not None:
            world.faults.point("flip", rank)
        while verdict is Verdict.BLOCK:
            self.world.faults.point("unknown", rank)
            yield None
            verdict = core.verdict()
        return verdict

    def _tree(self, mine: Ballot, epoch: int, step: int) -> Generator[Wait, None, Ballot | None]:
        """Up to the root and down again, frame by frame. None: it broke before the result was here."""
        world, role = self.world, self._role
        children = tree_children(role, world.world_size)
        parent = tree_parent(role)
        result = mine
        for child in children:
            frame = yield from self._receive("tree", child, epoch)
            if frame is None:
                return None
            result = result.combine(Ballot.unpack(frame.value))
        if parent is not None:
            if self._over(epoch):
                return None
            self._sent = True
            self._send("tree", parent, Frame("up", epoch, step, role, self.rank.incarnation, result.pack()))
            world.faults.point("voted", self.rank)
            frame = yield from self._receive("tree", parent, epoch)
            if frame is None:
                return None
            result = Ballot.unpack(frame.value)
        for child in children:
            self._sent = True
            self._send("tree", child, Frame("down", epoch, step, role, self.rank.incarnation, result.pack()))
            world.faults.point("vote_down", self.rank)
            yield world.pace("frame")
        return result
