"""What the rank's core asks of its shell. The shell carries them out in order and reports back through the core's events."""

from __future__ import annotations

import dataclasses

from tmd.protocol.membership import Install, Membership, Plan
from tmd.protocol.rank import RankStatus


@dataclasses.dataclass(frozen=True, slots=True)
class SendStatus:
    """Send to the daemon; may be lost, a newer one replaces it."""

    status: RankStatus


@dataclasses.dataclass(frozen=True, slots=True)
class CloseLinks:
    """Poison: close every link of every group whose epoch is at most `epoch` (STOP first, best effort), also links that are
    being opened or staged for such an epoch; wake every thread that waits on one."""

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class OpenLinks:
    """Open all links of this table in the background; answer with links_ready or links_failed."""

    membership: Membership
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class ActivateLinks:
    """The links opened for this epoch become the live ones of every group; collectives may use them."""

    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageLinks:
    """Open the links to the joiners (a joiner: all of its links) of plan.successor beside the live ones; answer with
    staged or stage_failed. A broken staged link never poisons."""

    plan: Plan
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class DropStaged:
    """Close what was staged for this plan."""

    plan_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class SwitchLinks:
    """The flip on a stayer: staged links replace those to the leavers, kept links go on in the new epoch. The leavers' links
    stay open, unused and unwatched, until RetireLinks. A staged link that broke meanwhile: link_broken for the new epoch."""

    plan: Plan
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class RetireLinks:
    """The first yes in the new epoch: close the links to the leavers."""

    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class TakeRole:
    """Become this rank (in place): groups, rendezvous environment, loader."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class FetchFromLeaver:
    """A joiner of a plan: subscribe to the leaver's state, which it sends once it has flipped; answer with state_loaded
    or state_failed for plan.successor.epoch."""

    plan: Plan
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class FetchFromSurvivors:
    """A joiner of a recovery: state from a replica, small state from the buddy; answer with state_loaded or state_failed."""

    install: Install
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Something that the main thread may be waiting for has changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """End the process at once with this code."""

    code: int
    reason: str


Instruction = (
    SendStatus
    | CloseLinks
    | OpenLinks
    | ActivateLinks
    | StageLinks
    | DropStaged
    | SwitchLinks
    | RetireLinks
    | TakeRole
    | FetchFromLeaver
    | FetchFromSurvivors
    | Wake
    | Exit
)
