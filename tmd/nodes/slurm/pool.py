"""The pool in Slurm: a reservation, and the jobs in it that tmd's agents have made for jobs that they serve.

Contract: each look asks Slurm anew. A job in the reservation is one of ours if the mark in its comment says so and it is of the
same user as the job that is named there. What has lost the job that it was made for is ended.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterable

import msgspec

from tmd.core.allocation import Allocation
from tmd.core.pool import Pool
from tmd.nodes.base import QueryFailed, ResourceManagerError, UnknownJob
from tmd.nodes.slurm import growth
from tmd.nodes.slurm.allocations import RUNNING
from tmd.nodes.slurm.commands import CommandClient
from tmd.nodes.slurm.configuration import parse_config, version_in
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

log = logging.getLogger(__name__)

#: slurm.conf is looked at so often.
CONFIG_S = 60.0
#: A job that was granted to be merged into another one is merged in a second; one that is still there after this long is not.
EXPANDER_S = 60.0
#: Flags of an idle node that stand in nobody's way.
_HARMLESS = frozenset({"RESERVED", "PLANNED", "DYNAMIC_NORM"})
_MARK = re.compile(r"tmd:(companion|expander)=(\d+(?:\.\d+)?)$")


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A job in the reservation that was made for another one, its `patron`."""

    job: SlurmJob
    #: companion or expander.
    kind: str
    patron: str


class SlurmPool:
    """`settings.standby_reservation` is not empty. Slurm is asked through its commands, whatever else is."""

    def __init__(self, settings: SlurmSettings, client: CommandClient) -> None:
        self._settings = settings
        self._client = client
        self._choice: growth.Choice | None = None
        self._chosen_s = float("-inf")
        #: Job -> its comment, which its owner could change, but not to anybody's harm.
        self._comments: dict[str, str] = {}
        #: Expander -> since when it has been seen, by the monotonic clock.
        self._seen_s: dict[str, float] = {}
        self._refused: set[str] = set()

    async def look(self) -> Pool:
        """Ends what has lost its job, and says what there is. Raises QueryFailed, RequestRefused."""
        name = self._settings.standby_reservation
        choice = await self._way()
        found = {each.name: each for each in await self._client.reservations()}.get(name)
        if found is not None:
            await self._end_strays(*await self._members())
        nodes = await self._client.nodes()
        word = describe(name, found, nodes, time.time())
        return msgspec.structs.replace(
            word, way=choice.way, refill=self._settings.refill, nodes_per_job=self._settings.pool_nodes_per_job
        )

    async def complete(self, words: list[Allocation]) -> list[Allocation]:
        """What jobs hold, with what their companions hold for them. Raises QueryFailed, RequestRefused."""
        members = (await self._members())[0] if any(word.live for word in words) else []
        return [with_companions(word, members) for word in words]

    async def end_companion(self, job_id: str) -> bool:
        """True if this is one: then it is ended. Raises QueryFailed, RequestRefused."""
        if any(member.job.job_id == job_id for member in (await self._members())[0]):
            await self._client.cancel(job_id)
            return True
        return False

    # ---------------------------------------------------------------- inside

    async def _way(self) -> growth.Choice:
        if self._choice is None or time.monotonic() - self._chosen_s >= CONFIG_S:
            config = parse_config(await self._client.config())
            choice = growth.choose(self._settings.growth, version_in(config.get("SLURM_VERSION", "")), config)
            if choice != self._choice:
                how = "by expansion" if choice.way == "expand" else "by companion jobs"
                log.info("nodes of reservation %s come into jobs %s: %s", self._settings.standby_reservation, how, choice.why)
            self._choice, self._chosen_s = choice, time.monotonic()
        return self._choice

    async def _members(self) -> tuple[list[Member], dict[str, SlurmJob]]:
        """Those that have not ended, and all jobs that have not, by id. Raises QueryFailed, RequestRefused."""
        ids = await self._client.jobs_in(self._settings.standby_reservation)
        self._comments = {job_id: text for job_id, text in self._comments.items() if job_id in ids}
        live = {job.job_id: job for job in await self._client.jobs()} if ids else {}
        members = []
        for job_id in ids:
            try:
                if job_id not in self._comments:
                    self._comments[job_id] = await self._client.comment(job_id)
            except UnknownJob:
                continue
            mark = _MARK.fullmatch(self._comments[job_id])
            if mark is not None and job_id in live:
                members.append(Member(live[job_id], mark[1], mark[2]))
        return members, live

    async def _end_strays(self, members: list[Member], live: dict[str, SlurmJob]) -> None:
        self._seen_s = {
            each.job.job_id: self._seen_s.get(each.job.job_id, time.monotonic()) for each in members if each.kind == "expander"
        }
        for member in members:
            job_id = member.job.job_id
            why = await self._why_stray(member, live)
            if not why or job_id in self._refused:
                continue
            try:
                await self._client.cancel(job_id)
                log.warning("job %s, made for job %s, is ended: %s", job_id, member.patron, why)
            except QueryFailed:
                raise
            except ResourceManagerError as error:
                self._refused.add(job_id)
                log.error(
                    "job %s holds nodes for nobody (%s) and cannot be ended: %s; end it: scancel %s", job_id, why, error, job_id
                )

    async def _why_stray(self, member: Member, live: dict[str, SlurmJob]) -> str:
        """Empty: it is not. One of another user than its patron's is none of ours."""
        since_s = self._seen_s.get(member.job.job_id)
        if since_s is not None and time.monotonic() - since_s >= EXPANDER_S:
            return f"it was not merged in {EXPANDER_S:g} s"
        number = member.patron.partition(".")[0]
        try:
            patron = live.get(number) or await self._client.job(number)
        except UnknownJob:
            return "that job is gone"
        if patron.uid != member.job.uid:
            return ""
        return "" if patron.life == member.patron and patron.held_nodes else "that job has ended"


def with_companions(word: Allocation, members: Iterable[Member]) -> Allocation:
    """`word` with the nodes of this job's companions that run."""
    mine = {
        node: member.job.job_id
        for member in members
        if member.kind == "companion" and member.patron == word.job_id and member.job.user == word.user
        if member.job.state in RUNNING
        for node in member.job.nodes
        if node not in word.nodes
    }
    if not mine or not word.live:
        return word
    return msgspec.structs.replace(word, nodes=tuple(sorted((*word.nodes, *mine))), companions=mine)


def describe(name: str, found: SlurmReservation | None, nodes: Iterable[SlurmNode], now_s: float) -> Pool:
    """What there is, without what the configuration says. `found` None: there is no such reservation."""
    if found is None:
        return Pool(name=name, way="companion", problem=f"there is no reservation {name}; docs/slurm.md says how it is made")
    free = tuple(node.name for node in nodes if node.name in found.nodes and is_free(node))
    users = tuple(user for user in found.users if not user.startswith("-")) if not found.accounts else ()
    problem = ""
    if now_s >= found.end_s:
        problem = f"reservation {name} has ended"
    elif now_s < found.start_s:
        problem = f"reservation {name} begins in {(found.start_s - now_s) / 60:.0f} min"
    elif found.state not in ("", "ACTIVE"):
        problem = f"Slurm calls reservation {name} {found.state}"
    return Pool(name=name, way="companion", nodes=found.nodes, free=free, users=users, problem=problem)


def is_free(node: SlurmNode) -> bool:
    """Sound, and nobody's."""
    return node.base == "IDLE" and _HARMLESS.issuperset(node.flags)
