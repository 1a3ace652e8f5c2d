"""What a migration cost: the six phases, downtime, lost time. All moments are seconds since the Unix epoch, as the processes
stamped them (commits, stamps) or as the daemon saw them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from tmd.core.processes import Process
from tmd.core.records import PHASES, MigrationKind, MigrationRecord
from tmd.protocol.rank import Commit

#: Committed steps kept for medians and look-ups.
STEPS_KEPT = 512
#: A normal step is the median of at most this many, and of at least MIN_SAMPLES.
MEDIAN_OF = 64
MIN_SAMPLES = 3
#: How many further committed steps belong to the window of a migration.
STEPS_AFTER = 5
#: What the ranks count of links that were opened anew between members that stayed: a recovery opens all of them, a planned
#: move none. Both ends of a link count it.
REOPENED: dict[MigrationKind, str] = {"planned": "stayer_links_reopened", "unplanned": "survivor_links_reopened"}


class CommitLog:
    """The job's committed steps: when each was first known to be committed, and in which epoch."""

    def __init__(self) -> None:
        self._steps: dict[int, Commit] = {}
        self.next_step = 0
        #: The normal step as of `next_step`.
        self._normal: tuple[int, float | None] = (-1, None)

    def take(self, process: Process) -> bool:
        """Adds what is new in a process's report. True if the job has made progress."""
        fresh = [commit for commit in process.report.commits if commit.step >= process.commits_taken]
        progress = False
        for commit in fresh:
            known = self._steps.get(commit.step)
            if known is None or commit.time_s < known.time_s:
                self._steps[commit.step] = commit
            progress = progress or commit.step >= self.next_step
            self.next_step = max(self.next_step, commit.step + 1)
        if fresh:
            process.commits_taken = fresh[-1].step + 1
            self._trim()
        return progress

    def _trim(self) -> None:
        if len(self._steps) > 2 * STEPS_KEPT:
            keep = sorted(self._steps)[-STEPS_KEPT:]
            self._steps = {step: self._steps[step] for step in keep}

    def last(self) -> Commit | None:
        return self._steps.get(self.next_step - 1)

    def first_in(self, epoch: int) -> Commit | None:
        """The first committed step of this epoch or a later one."""
        return min((commit for commit in self._steps.values() if commit.epoch >= epoch), default=None, key=lambda c: c.step)

    def before(self, step: int) -> Commit | None:
        """The last known commit before this step."""
        return max((commit for commit in self._steps.values() if commit.step < step), default=None, key=lambda c: c.step)

    def first_from(self, step: int) -> Commit | None:
        """The first known commit of this step or a later one (reports hold the last 64 only, so there may be gaps)."""
        return min((commit for commit in self._steps.values() if commit.step >= step), default=None, key=lambda c: c.step)

    def normal_step_s(self) -> float | None:
        """Median duration of the last steps, None if there are too few."""
        if self._normal[0] != self.next_step:
            self._normal = (self.next_step, self.normal_step_since(0))
        return self._normal[1]

    def normal_step_since(self, first: int) -> float | None:
        """Median duration of the last steps from step `first` on, None if there are too few."""
        steps = sorted(step for step in self._steps if step >= first)[-MEDIAN_OF - 1 :]
        durations = [
            (self._steps[b].time_s - self._steps[a].time_s) / (b - a)
            for a, b in itertools.pairwise(steps)
            if self._steps[a].epoch == self._steps[b].epoch
        ]
        return statistics.median(durations) if len(durations) >= MIN_SAMPLES else None


@dataclasses.dataclass(slots=True)
class Window:
    """The time from a migration's beginning until a few steps after it, and what must be remembered of it."""

    kind: MigrationKind
    started_s: float
    #: The last commit before the window, and the normal step then.
    first: Commit | None
    normal_step_s: float | None
    #: Incarnation -> its counters when the window began.
    counters: dict[str, dict[str, int]]
    #: Name of a moment -> when; see `phases`.
    marks: dict[str, float] = dataclasses.field(default_factory=dict)
    #: The epoch that the migration led to, once it runs.
    epoch: int | None = None
    #: Incarnations that took over a role.
    joiners: tuple[str, ...] = ()

    def mark(self, name: str, moment_s: float) -> None:
        """Notes the latest moment of this name."""
        self.marks[name] = max(moment_s, self.marks.get(name, moment_s))


def open_window(kind: MigrationKind, started_s: float, commits: CommitLog, processes: Iterable[Process]) -> Window:
    return Window(
        kind=kind,
        started_s=started_s,
        first=commits.last(),
        normal_step_s=commits.normal_step_s(),
        counters={process.incarnation: dict(process.report.counters) for process in processes},
    )


def phases(window: Window, first_step_s: float) -> dict[str, float]:
    """Seconds in each of PHASES. A phase lasts from the end of the one before to its own mark; a missing mark is a phase of no
    length, and nothing is later than the first step (a stamp that is later belongs to what came next). In a planned migration
    copying begins with the flip: waiting for the vote that carries it costs nobody anything."""
    durations = {}
    previous = window.started_s
    marks = {**window.marks, "first_step": first_step_s}
    for phase in PHASES:
        if phase == "copy":
            previous = max(previous, window.marks.get("flip", previous))
        end = max(previous, min(marks.get(phase, previous), first_step_s))
        durations[phase] = end - previous
        previous = end
    return durations


def _mark_from_reports(window: Window, processes: Iterable[Process]) -> None:
    """Moments that the ranks stamped themselves: those that hold the roles now, and the leavers."""
    for process in processes:
        stamps = process.report.stamps
        joins = process.incarnation in window.joiners
        if joins:
            if "state" in stamps:
                window.mark("copy", stamps["state"])
            if window.kind == "unplanned" and "install" in stamps:
                window.mark("prepare", stamps["install"])
        elif window.kind == "unplanned" and "linked" in stamps:
            window.mark("install", stamps["linked"])
        elif window.kind == "planned" and "flip" in stamps:
            window.marks["flip"] = min(stamps["flip"], window.marks.get("flip", stamps["flip"]))


def _grown(window: Window, holders: Iterable[Process], counter: str) -> list[int]:
    return [
        process.report.counters.get(counter, 0) - window.counters.get(process.incarnation, {}).get(counter, 0)
        for process in holders
        if process.incarnation not in window.joiners
    ]


def complete(
    window: Window, migration: MigrationRecord, commits: CommitLog, holders: list[Process], leavers: list[Process]
) -> tuple[dict[str, Any], bool]:
    """The changes to the migration's record as far as they can be told, and whether they are final.

    downtime = last commit before to first commit after, minus a normal step, and never less than nothing.
    lost time = the excess over normal of all steps of the window, which ends STEPS_AFTER steps after; noise may make it negative.
    It is final once every holder has told of the last step of the window: what each has stamped and counted is known then.
    """
    if window.epoch is None:
        return {}, False
    after = commits.first_in(window.epoch)
    if after is None:
        return {}, False
    _mark_from_reports(window, [*holders, *(leavers if window.kind == "planned" else [])])
    normal = window.normal_step_s
    if normal is None:
        normal = commits.normal_step_since(after.step)
    changes: dict[str, Any] = {
        "phases_s": phases(window, after.time_s),
        "normal_step_s": normal,
        "steps_redone": max([0, *_grown(window, holders, "steps_redone")]),
        "stayer_links_reopened": math.ceil(sum(_grown(window, holders, REOPENED[window.kind])) / 2),
        "bytes_moved": sum(
            process.report.counters.get("state_bytes", 0) for process in holders if process.incarnation in window.joiners
        ),
    }
    origins = {process.report.record_origin for process in holders if process.incarnation in window.joiners} - {""}
    if origins:  # a stayer may tell of the first step before the joiner tells where its state came from
        changes["record_origin"] = ", ".join(sorted(origins))
    handoffs = {
        process.report.rank: process.report.handoff
        for process in holders
        if process.incarnation in window.joiners and process.report.rank is not None and process.report.handoff is not None
    }
    if handoffs:
        changes["handoffs"] = handoffs
    before = commits.before(after.step)
    if before is not None and normal is not None:
        downtime_s = max(0.0, (after.time_s - before.time_s) - (after.step - before.step) * normal)
        changes |= {"downtime_s": downtime_s, "downtime_steps": downtime_s / normal if normal > 0 else None}
    last = commits.first_from(after.step + STEPS_AFTER)
    if last is None:
        return changes, False
    if window.first is not None and normal is not None:
        steps = last.step - window.first.step
        changes["lost_time_s"] = (last.time_s - window.first.time_s) - steps * normal
    return changes, all(process.report.next_step > last.step for process in holders)
