"""The border behind which a resource manager lives.

Contract: the daemon asks for nodes, marks them for draining and gives them back through `ResourceManager`, and through
nothing else. A query that fails means *unknown*: never "clean", never "down". Nothing here is of one implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from tmd.core.records import NodeState

#: States in which something of a job may still run on the node.
BUSY_STATES = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})
#: Flags of a node that is to be left: nothing new starts there, and what runs should go.
LEAVING_FLAGS = frozenset({"DRAIN", "FAIL", "REBOOT_REQUESTED", "REBOOT_ISSUED", "POWER_DOWN", "POWERING_DOWN", "INVALID_REG"})


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its resource manager sees it: a base state plus flags, as in "IDLE+DRAIN"."""

    name: str
    #: IDLE, ALLOCATED, MIXED, COMPLETING, DOWN or UNKNOWN; any other is unknown to tmd. Draining is a flag, never a base state.
    base: str
    #: For example DRAIN, NOT_RESPONDING. A node that does not answer is up until it is called down: its agent knows sooner.
    flags: tuple[str, ...] = ()
    #: Where the node's ranks listen.
    address: str = ""
    #: Failure domains, "rack" and "zone" among them, where the resource manager knows them.
    labels: dict[str, str] = {}
    #: Why it is drained or down, in the words of whoever did it.
    reason: str = ""
    #: The jobs that hold this node.
    jobs: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """Base and flags in one word, as operators know it."""
        return "+".join((self.base, *self.flags))

    @property
    def meaning(self) -> NodeState:
        """What the daemon's core makes of it."""
        if self.base == "DOWN":
            return "down"
        busy = not BUSY_STATES.isdisjoint((self.base, *self.flags))
        if not LEAVING_FLAGS.isdisjoint(self.flags):
            return "drained" if self.base == "IDLE" and not busy else "draining"
        return "up" if busy or self.base == "IDLE" else "unknown"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A node is now in this state. Repetition is harmless."""

    node: str
    state: NodeState
    reason: str = ""


class ResourceManagerError(Exception):
    """Something was asked of the resource manager that did not happen; the text says what and why, `remedy` what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class QueryFailed(ResourceManagerError):
    """The resource manager did not answer: every node's state is unknown until it does."""


class UnknownNode(ResourceManagerError):
    """There is no node of this name."""


class UnknownJob(ResourceManagerError):
    """The resource manager knows no job of this id."""


class RequestRefused(ResourceManagerError):
    """The node or job is not in a state in which this can be done."""


class InvalidRequest(ResourceManagerError):
    """What was asked for makes no sense, whatever the nodes and jobs do."""


class NotRecorded(ResourceManagerError):
    """It could not be put on record, so it was not done."""


class ResourceManager(Protocol):
    """What the daemon needs of Slurm, or of whatever takes its place."""

    async def nodes(self) -> list[NodeView]:
        """All nodes, by name. Raises QueryFailed."""
        ...

    async def drain(self, node: str, reason: str) -> None:
        """Nothing new may start on the node; what runs goes on. An earlier drain and its reason are left as they are.

        Raises UnknownNode, QueryFailed, NotRecorded.
        """
        ...

    async def resume(self, node: str) -> None:
        """Ends a drain. Raises UnknownNode, RequestRefused, QueryFailed, NotRecorded."""
        ...

    async def release(self, job_id: str, node: str) -> None:
        """The job needs this node no more. Returns once that is on record; what the job still runs there is ended soon after.

        Idempotent: a node that the job does not hold is released already.

        Raises UnknownNode, QueryFailed, NotRecorded; RequestRefused where the manager does not part a job from this node, which
        is then free once the job ends.
        """
        ...

    def watch(self) -> AsyncIterator[NodeEvent]:
        """First the state of every node, then each change, until `close`. While queries fail: "unknown", once per node.

        Raises QueryFailed if the first query fails, as no node is known yet.
        """
        ...

    async def close(self) -> None:
        """Ends every watch. Jobs and nodes stay as they are."""
        ...
