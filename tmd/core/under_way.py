"""What is under way in a job beyond what is in its ledger: a recovery, an attempt to install, a plan in flight, an errand. Plain
values, written by the transitions that they are named after."""

from __future__ import annotations

import dataclasses

from tmd.protocol.agent import OrderKind
from tmd.protocol.membership import Install


@dataclasses.dataclass(slots=True)
class Recovery:
    """A recovery in progress: from the first sign until the word to go on."""

    since_s: float
    sign: str
    #: When the first sign was there, as far as the machines can tell.
    sign_s: float
    #: The event that it began with.
    cause: int
    #: Ranks lost in it -> the incarnation that held the role when it began.
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    failed_nodes: set[str] = dataclasses.field(default_factory=set)
    #: Of every attempt to install that failed so: the pairs of incarnations between which no link could be opened.
    unreached: list[frozenset[frozenset[str]]] = dataclasses.field(default_factory=list)
    #: Somebody was still building: a build cannot be rolled back.
    must_restart: str = ""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One attempt to install an epoch."""

    install: Install
    since_s: float
    #: 1 for the first of a recovery.
    number: int = 1
    #: When a survivor was last seen in its step: the time for installing counts from there.
    busy_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Flight:
    """The outstanding plan beyond what is in the ledger."""

    since_s: float
    flipped_s: float | None = None
    #: Why it is being called off; empty: it is not.
    withdrawn: str = ""
    #: Called off because of the joiner: another standby may be tried.
    retry: bool = False


@dataclasses.dataclass(slots=True)
class Errand:
    """Something that agents of the job do for it with the resource manager's commands: starting an agent on a node, giving nodes
    back, or taking one from the pool. An attempt is one order to one agent."""

    #: The outstanding order, and who has it; empty: there is none.
    order_id: str = ""
    agent_id: str = ""
    #: When the order was given, or the errand seen to be one.
    since_s: float = 0.0
    kind: OrderKind = "launch"
    nodes: tuple[str, ...] = ()
    #: Where a node is taken from.
    reservation: str = ""
    #: Attempts that failed in a row, when the next one may come, and why the last one failed.
    failures: int = 0
    retry_at_s: float = 0.0
    failure: str = ""
