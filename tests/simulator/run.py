"""Runs one seed to its end and says what happened."""

from __future__ import annotations

import collections
import dataclasses

from tests.simulator.bugs import planted
from tests.simulator.checks import Violation
from tests.simulator.world import World
from tmd_worker.core.answers import BrokenInvariant

EVENT_LIMIT = 60_000


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed came to. `violation` is empty if every rule held; `rule` is false if it was no rule that ended the seed, but
    an exception of another kind: a core that does not work at all, which finds nothing."""

    seed: int
    violation: str
    rule: bool
    events: int
    faults: int
    kinds: collections.Counter[str]
    result: str
    simulated_s: float
    commits: int


def run_seed(seed: int, *, bug: str = "", verbose: bool = False) -> Outcome:
    """Any exception of a core counts as a violation, too: it would have ended the process."""
    with planted(bug):
        world = World(seed, bug=bug, verbose=verbose)
    violation, rule = "", True
    try:
        with planted(bug):
            _play(world)
        world.checks.at_end()
    except Violation as broken:
        violation = str(broken)
        _show_ranks(world)
    except Exception as error:
        if verbose:
            raise
        violation, rule = f"{type(error).__name__}: {error}", isinstance(error, AssertionError | BrokenInvariant)
    job = world.ledger.jobs.get(world.job_id)
    result = f"{job.state}: {job.reason}" if job is not None else "no job"
    return Outcome(
        seed,
        violation,
        rule,
        world.events,
        world.checks.faults,
        world.faults.struck,
        result,
        world.now,
        len(world.checks.committed),
    )


def _show_ranks(world: World) -> None:
    """Where every living process stands, for the reader of a trace."""
    for process in world.processes.values():
        core = process.core
        if process.alive:
            epochs = f"runs {core.run_epoch}, live {core.live_epoch}, poisoned {core.poisoned_epoch}, linked {core.linked_epoch}"
            steps = f"next step {core.next_step}, applied {core.applied_step}, attempt {process.main.attempt}"
            frozen = ", on a frozen node" if process.machine.frozen else ""
            world.note(process.name, f"rank {core.rank} is {core.phase}{frozen}; epochs: {epochs}; {steps}")


def _play(world: World) -> None:
    """Until the job is over and everybody has left."""
    checks = world.checks
    while world.step():
        checks.after_event()
        if world.events > EVENT_LIMIT:
            raise Violation(f"liveness: {EVENT_LIMIT} events and no end")
        if checks.job_over and not any(agent.alive for agent in world.agents.values()):
            return
