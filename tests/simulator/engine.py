"""The event loop: a heap of (time, sequence, actor, action). Actors live on machines that can freeze and thaw.

Contract: an action of a dead actor is dropped; an action of an actor on a frozen machine waits until the machine thaws.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from tests.simulator.trace import Trace


class Machine:
    """Where actors run: a node of the job, or the head node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.backlog: list[tuple[Actor, Callable[..., None], tuple[Any, ...]]] = []


class Actor:
    """Something that gets events for as long as it lives."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.alive = True


class Engine:
    """Time, randomness and the order of events."""

    def __init__(self, seed: int, trace: Trace) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.trace = trace
        self._heap: list[tuple[float, int, Actor, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def after(self, delay_s: float, actor: Actor, action: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, actor, action, args))

    def between(self, low_s: float, high_s: float) -> float:
        return low_s + (high_s - low_s) * self.random.random()

    def step(self) -> bool:
        """Runs the next event that has somebody to run it. False: there is none left."""
        while self._heap:
            self.now, _, actor, action, args = heapq.heappop(self._heap)
            if not actor.alive:
                continue
            if actor.machine.frozen:
                actor.machine.backlog.append((actor, action, args))
                continue
            self.events += 1
            action(*args)
            return True
        return False

    def freeze(self, machine: Machine) -> None:
        machine.frozen = True

    def thaw(self, machine: Machine) -> None:
        """What piled up is done now, in its old order."""
        machine.frozen = False
        backlog, machine.backlog = machine.backlog, []
        for actor, action, args in backlog:
            self.after(0.0, actor, action, *args)
