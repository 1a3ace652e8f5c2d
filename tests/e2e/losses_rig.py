"""One long job for many losses: each test finds it whole, does something to it, and sees it whole again, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
import os
import signal
from collections.abc import Iterable
from typing import Any

from tests.e2e.cluster import PACE_MS, WORLD_SIZE, Cluster, Job, assert_unharmed, until

#: As many as the reference has.
STEPS = 1500
#: So many steps before its end a long job is too short for another test.
MARGIN = 250
#: For all of its steps, on a machine that does other things as well.
FINISH_S = 400.0
POLL_S = 0.1
#: A step lasts at least this long while replacements start, so that one job lasts for many tests.
IDLE_PACE_MS = 400


def strike(pids: Iterable[int]) -> None:
    """SIGKILL to all of them within microseconds."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass(slots=True)
class LongJob:
    """A job of four ranks with standbys; when it comes near its end another one follows."""

    cluster: Cluster
    reference: Job
    #: So many are ready before a test acts on it, of as many as there are nodes for.
    standbys: int = 2
    spares: int | None = None
    job: Job | None = None
    #: How often each rank was killed so far: each time it may have died between a commit and the line about it.
    kills: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    #: Migrations that a test has accounted for, or that came before it.
    _known: set[str] = dataclasses.field(default_factory=set)

    def whole(self) -> Job:
        """The job, all of whose standbys are ready; a new one if it is over or comes near its end."""
        job = self.job
        if job is not None:
            view = job.view()
            over = view["record"]["state"] in ("done", "failed")
            if not over and view["next_step"] < STEPS - MARGIN:
                job.set_pace(IDLE_PACE_MS)
                self._bring_nodes_up()
                return self._ready(job)
            if not over:
                self.finish()
                self.assert_unharmed()
            job.wait_gone()
        self._bring_nodes_up()
        self.kills.clear()
        self.job = self.cluster.start_job(standby=self.spares or self.standbys, steps=STEPS, pace_ms=IDLE_PACE_MS)
        return self._ready(self.job)

    def _ready(self, job: Job) -> Job:
        job.wait_ready(self.standbys)
        job.set_pace(PACE_MS)
        self._known = {record["migration_id"] for record in job.migrations()}
        return job

    def end(self) -> None:
        if self.job is not None:
            if self.job.record()["state"] not in ("done", "failed"):
                self.job.cancel()
            self.job.wait_gone()
        self.job = None

    def finish(self) -> None:
        """Lets it run to its end, as fast as it can."""
        assert self.job is not None
        self.job.set_pace(0)
        self.job.wait_state("done", within_s=FINISH_S)
        self.job.wait_gone()

    def kill(self, pid: int, *, rank: int) -> None:
        """SIGKILL to this process, which is the rank or takes it along."""
        self.kills[rank] += 1
        strike([pid])

    def kill_rank(self, rank: int) -> None:
        assert self.job is not None
        self.kill(self.job.pids()[rank], rank=rank)

    def power_off(self, *ranks: int) -> None:
        """The nodes of these ranks lose everything at once; nobody tells the resource manager."""
        assert self.job is not None
        agents, pids = running_agents(self.job), self.job.pids()
        self.kills.update(ranks)
        strike([*(agents[self.job.node_of(rank)] for rank in ranks), *(pids[rank] for rank in ranks)])

    def recovered(self, *ranks: int) -> dict[str, Any]:
        """The record of the last recovery that replaced these ranks, once the job commits steps again, unharmed."""
        record = self.replaced(*ranks)
        assert self.job is not None
        self.job.wait_progress()
        self.assert_unharmed()
        return record

    def replaced(self, *ranks: int) -> dict[str, Any]:
        """The record of the last recovery that replaced these ranks, once the first step with the joiners is committed."""
        job = self.job
        assert job is not None
        records = until(lambda: self._done_since(job, set(ranks)), f"ranks {ranks} of {job.id} are replaced", every_s=POLL_S)
        self._known |= {record["migration_id"] for record in records}
        return records[-1]

    def _done_since(self, job: Job, ranks: set[int]) -> list[dict[str, Any]]:
        """The recoveries that no test has accounted for, once they have replaced all of these ranks."""
        assert job.record()["state"] not in ("done", "failed"), job.record()["reason"]
        fresh = [move for move in job.migrations() if move["kind"] == "unplanned" and move["migration_id"] not in self._known]
        for move in fresh:
            assert move["state"] not in ("failed", "aborted"), move["reason"]
        replaced = {int(rank) for move in fresh if move["state"] == "done" for rank in move["leavers"]}
        return fresh if ranks <= replaced else []

    def assert_unharmed(self) -> None:
        assert self.job is not None
        assert self.job.record()["approximations"] == []
        assert_unharmed(self.job, self.reference, lines_lost=self.kills)

    def _bring_nodes_up(self) -> None:
        """Every node is on, not drained, and has an agent that serves the job."""
        self.cluster.tidy()
        if self.job is None or self.job.record()["state"] in ("done", "failed"):
            return
        serving = {each["node"] for each in self.job.view()["nodes"] if each["use"] in ("training", "standby")}
        for node in {each["node"] for each in self.job.agents()} - (serving & running_agents(self.job).keys()):
            # A node that was killed is called down only after a while; one that merely has no agent must be killed first.
            if self.cluster.tmctl("local", "up", node).exit_code != 0:
                self.cluster.reboot(node)


def running_agents(job: Job) -> dict[str, int]:
    """Node -> pid of its agent."""
    return {agent["node"]: agent["pid"] for agent in job.agents() if agent["running"]}


def stayers(before: dict[int, int], after: dict[int, int]) -> set[int]:
    """Ranks whose process is the same."""
    return {rank for rank in range(WORLD_SIZE) if before[rank] == after[rank]}


def continue_stopped(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def written(job: Job) -> int:
    """The last step of which a rank has written a line: progress that is seen without the daemon."""
    return max((row["step"] for row in job.rows()), default=-1)


def wait_written(job: Job, steps: int) -> None:
    """So many more steps are committed, as the ranks' files say."""
    target = written(job) + steps
    until(lambda: written(job) >= target, f"step {target} of {job.id} is written")
