"""What goes wrong, and when: a list drawn from the seed. A fault waits for a step of the job and then for a point in the
protocol ("voted", "handoff", ...) or for a short while; who is hit is drawn when it strikes.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from tests.simulator.engine import Actor, Machine
from tests.simulator.rank import SIGKILL, SimRank
from tmd.core.daemon import Refused
from tmd.core.records import NodeState

if TYPE_CHECKING:
    from tests.simulator.world import World

#: Points of the protocol that a fault may wait for: of a recovery, of a vote, and of a planned migration.
RECOVERY_POINTS = ("poison", "install", "fetch", "fetch_source", "linked", "go", "unknown")
VOTE_POINTS = ("vote", "voted", "vote_down", "vote_down")
PLAN_POINTS = ("stage", "staged", "flip", "flip", "switch", "handoff", "handoff_source", "retire")
#: (weight, kind) of what goes wrong, and of what operators and the resource manager ask for.
KINDS = (
    (22, "kill_rank"),
    (8, "kill_node"),
    (3, "kill_standby"),
    (7, "freeze_node"),
    (4, "freeze_briefly"),
    (8, "flap"),
    (2, "deafen"),
    (5, "partition"),
    (12, "crash_daemon"),
    (4, "kill_two"),
    (1, "user_bug"),
)
REQUESTS = (
    (14, "migrate_rank"),
    (6, "migrate_node"),
    (7, "drain"),
    (8, "abort"),
    (1, "pause"),
)
#: What a job survives, and what nearly always has somebody to strike.
SOFT = ("flap", "freeze_briefly", "crash_daemon")
#: A fault that finds nobody to strike tries again after so long, and after so many times as one of SOFT.
AGAIN_S, PATIENT_TIMES = 0.004, 3
#: What a job may not survive, and how many faults and events come before it must be able to.
HARD = ("kill_rank", "kill_two", "kill_node", "freeze_node", "user_bug", "deafen")
FEWEST, LEAST_EVENTS = 3, 300
#: What has not struck this many steps before the end does so now.
LAST_STEPS = 4
OPEN_STATES = ("queued", "selecting", "preparing", "installing", "armed", "copying")


@dataclasses.dataclass(slots=True)
class Fault:
    kind: str
    #: Not before this step is the next one.
    step: int
    #: A point of the protocol that it waits for, and how many are let pass; "": only the delay.
    point: str
    passes: int
    delay_s: float
    #: Operators' wishes are no faults: they do not count as such.
    is_request: bool
    tried: int = 0
    struck: bool = False


class Faults(Actor):
    """Draws the faults of a seed and carries them out. An actor of its own: nothing stops it."""

    #: A fault whose point does not come is carried out anyway after this long.
    patience_s = 0.2

    def __init__(self, world: World) -> None:
        super().__init__(Machine("fate"), "fate")
        self.world = world
        self.struck: collections.Counter[str] = collections.Counter()
        drawn = [self._draw(KINDS) for _ in range(world.random.randint(3, 5))]
        drawn += [self._draw(REQUESTS, is_request=True) for _ in range(world.random.randint(0, 3))]
        self._waiting = sorted(drawn, key=lambda fault: fault.step)
        self._armed: list[Fault] = []
        self._next_step = -1
        self._regrets = False
        self.reached(0)

    def _draw(self, kinds: tuple[tuple[int, str], ...], *, is_request: bool = False) -> Fault:
        choose = self.world.random
        kind = choose.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        point = choose.choice(choose.choice((RECOVERY_POINTS, VOTE_POINTS, PLAN_POINTS))) if choose.random() < 0.65 else ""
        delay_s = 0.0 if point and choose.random() < 0.6 else choose.random() * 0.08
        step = choose.randint(0, self.world.last_fault_step)
        return Fault(kind, step, point, choose.choice((0, 0, 0, 1, 2, 5)), delay_s, is_request)

    # ---------------------------------------------------------------- when

    def reached(self, step: int) -> None:
        """The job has come to this step."""
        if step <= self._next_step:
            return
        self._next_step = step
        while self._waiting and self._waiting[0].step <= step:
            fault = self._waiting.pop(0)
            self._armed.append(fault)
            if fault.point in PLAN_POINTS and self.world.random.random() < 0.7:
                self.world.after(0.0, self, self._bring_about_a_plan)
            patience_s = self.patience_s if fault.point else fault.delay_s
            self.world.after(patience_s, self, self._strike, fault, None)
        if step == self.world.total_steps - LAST_STEPS:
            for fault in self._armed:
                self.world.after(0.01 * self.world.random.random(), self, self._strike, fault, None)

    def _bring_about_a_plan(self) -> None:
        if not any(migration.state in OPEN_STATES for migration in self.world.ledger.migrations.values()):
            self._migrate_rank(None)

    def point(self, name: str, rank: SimRank) -> None:
        for fault in self._armed:
            if fault.point == name and not fault.struck:
                if fault.passes:
                    fault.passes -= 1
                else:
                    self.world.after(fault.delay_s, self, self._strike, fault, rank)
                    fault.point = ""

    def _strike(self, fault: Fault, involved: SimRank | None) -> None:
        if fault.struck or self.world.checks.job_over:
            return
        if self._comes_too_early(fault):
            self.world.after(0.03, self, self._strike, fault, involved)
            return
        fault.struck = True
        if getattr(self, f"_{fault.kind}")(involved):
            self._armed.remove(fault)
            self.struck[fault.kind] += 1
            if not fault.is_request:
                self.world.checks.fault_strikes()
        elif fault.is_request:
            self._armed.remove(fault)
        else:
            self._try_again(fault)

    def _try_again(self, fault: Fault) -> None:
        """There was nobody to strike."""
        fault.struck = False
        fault.tried += 1
        if fault.tried >= PATIENT_TIMES:
            fault.kind = self.world.random.choice(SOFT)
        self.world.after(AGAIN_S, self, self._strike, fault, None)

    def _comes_too_early(self, fault: Fault) -> bool:
        """The job may end by a fault, but not before its third one, nor right at its beginning; near its end a fault that would
        be too hard is a softer one."""
        enough = self.world.checks.faults >= FEWEST - 1 and self.world.events >= LEAST_EVENTS
        if enough or fault.kind not in HARD or self._survives(fault):
            return False
        if self._next_step < self.world.total_steps - LAST_STEPS:
            return True
        fault.kind = self.world.random.choice(SOFT)
        return False

    def _survives(self, fault: Fault) -> bool:
        return self.would_survive(fault.kind)

    def would_survive(self, kind: str) -> bool:
        """The job can be expected to outlive it: everybody is there, and a standby is ready."""
        job = self.world.ledger.jobs.get(self.world.job_id)
        if kind in ("user_bug", "kill_two", "deafen") or job is None or job.state != "running":
            return False
        standbys = [process for process in self.world.processes.values() if process.alive and process.core.phase == "ready"]
        drained = any(node.state in ("draining", "drained") for node in self.world.ledger.nodes.values())
        ready = not drained and sum(not process.machine.frozen for process in standbys) >= 2
        members = self._members()
        sound = [
            process
            for process in members
            if not process.machine.frozen and process.core.run_epoch == job.epoch > process.core.poisoned_epoch
        ]
        return ready and len(sound) == self.world.world_size and not self.world.partitioned

    # ---------------------------------------------------------------- whom

    def _members(self) -> list[SimRank]:
        job = self.world.ledger.jobs.get(self.world.job_id)
        if job is None or job.table is None:
            return [process for process in self.world.processes.values() if process.alive]
        processes = self.world.processes
        members = [processes[member.incarnation] for member in job.table.members.values() if member.incarnation in processes]
        return [process for process in members if process.alive]

    def _victim(self, involved: SimRank | None) -> SimRank | None:
        if involved is not None and involved.alive and self.world.random.random() < 0.75:
            return involved
        members = self._members()
        return self.world.random.choice(members) if members else None

    def _note(self, who: str, text: str) -> None:
        self.world.note("fate", f"{text} {who}")

    # ---------------------------------------------------------------- what

    def _kill_rank(self, involved: SimRank | None) -> bool:
        victim = self._victim(involved)
        if victim is None:
            return False
        self._note(victim.name, "kills")
        self.world.checks.touched([victim])
        victim.die(SIGKILL)
        return True

    def _kill_two(self, involved: SimRank | None) -> bool:
        """One, and a second one while the job recovers from the first."""
        self.world.after(0.005 + 0.06 * self.world.random.random(), self, self._kill_another)
        return self._kill_rank(involved)

    def _kill_another(self) -> None:
        if self._kill_rank(None):
            self.world.checks.fault_strikes()

    def _kill_standby(self, _: SimRank | None) -> bool:
        members = self._members()
        spare = [process for process in self.world.processes.values() if process.alive and process not in members]
        return bool(spare) and self._kill_rank(self.world.random.choice(spare))

    def _kill_node(self, involved: SimRank | None) -> bool:
        victim = self._victim(involved)
        if victim is None:
            return False
        world, machine = self.world, victim.machine
        agent = world.agents[machine.name]
        self._note(machine.name, "kills node")
        world.checks.touched(agent.processes.values())
        silent = world.random.random() < 0.4
        agent.end(silent=silent)
        if silent and world.random.random() < 0.5:
            down_s = world.random.random()
            self._say_state(machine.name, "down", "not responding", down_s)
            if world.slurm is not None:
                world.after(down_s, world.slurm, world.slurm.cut, machine.name)
        if world.random.random() < 0.5:
            world.after(0.1 + world.random.random(), self, self._return, machine)
        return True

    def _return(self, machine: Machine) -> None:
        if not self.world.agents[machine.name].alive and not self.world.checks.job_over:
            self._note(machine.name, "brings back")
            self._say_state(machine.name, "up", "back", 0.0)
            if self.world.slurm is None:
                self.world.new_agent(machine)

    def _freeze_node(self, involved: SimRank | None) -> bool:
        return self._freeze(involved, 0.3 + 3 * self.world.random.random())

    def _freeze_briefly(self, involved: SimRank | None) -> bool:
        return self._freeze(involved, 0.02 + 0.3 * self.world.random.random())

    def _freeze(self, involved: SimRank | None, for_s: float) -> bool:
        victim = self._victim(involved)
        if victim is None or victim.machine.frozen:
            return False
        world, machine = self.world, victim.machine
        self._note(machine.name, f"freezes for {for_s:.2f} s node")
        world.checks.touched(world.agents[machine.name].processes.values())
        world.freeze(machine)
        world.after(for_s, self, self._thaw, machine)
        return True

    def _thaw(self, machine: Machine) -> None:
        self._note(machine.name, "thaws")
        self.world.checks.touched(self.world.agents[machine.name].processes.values())
        self.world.thaw(machine)

    def _flap(self, involved: SimRank | None) -> bool:
        """A link breaks under two processes that live."""
        world = self.world
        world.pairs = [end for end in world.pairs if not end.closed and not end.mate.closed]
        live = [end for end in world.pairs if involved is None or involved in (end.owner, end.mate.owner)]
        if not live:
            return False
        end = world.random.choice(live)
        self._note(f"{end.owner.name} and {end.mate.owner.name}", "cuts a link between")
        world.checks.touched([end.owner, end.mate.owner])
        for side in (end, end.mate):
            world.after(world.link_delay(), side.owner, side.see_end, False)
        return True

    def _deafen(self, involved: SimRank | None) -> bool:
        """A rank that is out of descriptors: nobody can open a link to it any more, and one breaks. Standbys are not enough to
        outlive it unless it is found out."""
        victim = self._victim(involved)
        if victim is None:
            return False
        self._note(victim.name, "takes the last descriptor of")
        self.world.checks.touched([victim])
        victim.deaf = True
        return self._flap(None)

    def _partition(self, involved: SimRank | None) -> bool:
        world = self.world
        there = [machine for machine in world.machines if machine.name in world.agents]
        machines = there if world.random.random() < 0.2 else [world.random.choice(there)]
        if involved is not None and len(machines) == 1:
            machines = [involved.machine]
        for_s = 0.1 + 2.5 * world.random.random()
        for machine in machines:
            self._note(machine.name, f"partitions for {for_s:.2f} s")
            world.partitioned.add(machine.name)
            world.checks.partitioned(world.agents[machine.name].processes.values())
            if world.random.random() < 0.5:
                world.after(world.random.random(), world.daemon, world.daemon.gone_for_now, world.agents[machine.name])
        world.after(for_s, self, self._heal, machines)
        return True

    def _heal(self, machines: list[Machine]) -> None:
        for machine in machines:
            self._note(machine.name, "heals partition of")
            self.world.partitioned.discard(machine.name)

    def _crash_daemon(self, _: SimRank | None) -> bool:
        """Now, or between two instructions of one of the next batches."""
        world = self.world
        if not world.daemon.alive:
            return False
        after = world.random.choice((0, 0, 1, 2, 3, 5, 8))
        if after:
            world.daemon.crash_after = after
        else:
            world.daemon.crash()
        for_s = world.random.choice((0.01, 0.05, 0.3, 1.0, 2.0)) * (0.5 + world.random.random())
        world.after(for_s, self, self._daemon_back)
        return True

    def _daemon_back(self) -> None:
        if self.world.daemon.alive:
            if self.world.daemon.crash_after is None:
                return
            self.world.daemon.crash()
        self.world.restart_daemon()

    # ---------------------------------------------------------------- operators and the resource manager

    def _request(self, *, node: str | None = None, rank: int | None = None) -> bool:
        daemon = self.world.daemon
        if not daemon.alive:
            return False
        self._note(node or f"rank {rank}", "asks to migrate")
        try:
            _, out = daemon.core.request_migration(self.world.now, self.world.job_id, node=node, rank=rank, who="operator")
        except Refused as refusal:
            self._note(str(refusal), "was refused:")
            return True
        daemon.carry_out(out)
        return True

    def _migrate_rank(self, involved: SimRank | None) -> bool:
        rank = involved.rank if involved is not None else None
        return self._request(rank=self.world.random.randrange(self.world.world_size) if rank is None else rank)

    def _migrate_node(self, involved: SimRank | None) -> bool:
        victim = self._victim(involved)
        return victim is not None and self._request(node=victim.machine.name)

    def _say_state(self, node: str, state: NodeState, reason: str, delay_s: float) -> None:
        self.world.after(delay_s, self, self._node_state, node, state, reason)

    def _node_state(self, node: str, state: NodeState, reason: str) -> None:
        """The resource manager's word; it is asked again until the daemon is there to hear it."""
        daemon = self.world.daemon
        if daemon.alive:
            daemon.carry_out(daemon.core.node_state(self.world.now, node, state, reason))
        elif not self.world.checks.job_over:
            self._say_state(node, state, reason, 0.1)

    def _drain(self, involved: SimRank | None) -> bool:
        victim = self._victim(involved)
        if victim is None:
            return False
        self._note(victim.machine.name, "drains")
        self._node_state(victim.machine.name, "draining", "maintenance")
        if self.world.random.random() < 0.3:
            self._say_state(victim.machine.name, "up", "resumed", 0.4 * self.world.random.random())
        return True

    def _abort(self, involved: SimRank | None) -> bool:
        """An operator changes their mind: some time after asking, or when the leavers may already have raised their flags."""
        self._migrate_rank(involved)
        if self.world.random.random() < 0.5:
            self._regrets = True
        else:
            self.world.after(0.12 * self.world.random.random(), self, self._call_off)
        return True

    def armed(self) -> None:
        """The ledger says that the leavers of a plan may flip."""
        if self._regrets:
            self._regrets = False
            self.world.after(0.015 * self.world.random.random(), self, self._call_off)

    def _call_off(self) -> None:
        daemon = self.world.daemon
        open_ids = [m.migration_id for m in self.world.ledger.migrations.values() if m.state in OPEN_STATES]
        if not daemon.alive or not open_ids:
            return
        chosen = self.world.random.choice(open_ids)
        self._note(chosen, "calls off")
        try:
            daemon.carry_out(daemon.core.abort_migration(self.world.now, chosen, "operator"))
        except Refused as refusal:
            self._note(str(refusal), "was refused:")

    def _pause(self, _: SimRank | None) -> bool:
        self._set_paused(True)
        self.world.after(self.world.random.random(), self, self._set_paused, False)
        return True

    def _set_paused(self, paused: bool) -> None:
        daemon = self.world.daemon
        if daemon.alive:
            daemon.carry_out(daemon.core.set_paused(self.world.now, paused, "operator"))
        elif not self.world.checks.job_over:
            self.world.after(0.1, self, self._set_paused, paused)

    def _user_bug(self, involved: SimRank | None) -> bool:
        """The user's script raises in one rank that is not poisoned."""
        victim = self._victim(involved)
        if victim is None or victim.machine.frozen or victim.core.phase != "running" or victim.main.attempt is None:
            return False
        self._note(victim.name, "raises in the script of")
        self.world.checks.touched([victim])
        self.world.checks.raised, self.world.checks.raised_s = victim, self.world.now
        victim.perform(victim.core.failed(f"Traceback: ValueError in {victim.name}"))
        victim.die(1)
        return True
