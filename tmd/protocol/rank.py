"""The two messages between the daemon and a rank (they travel through the rank's agent): `Directive` down, `RankStatus` up.

Both carry the whole truth of their sender, so only the newest one matters.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tmd.protocol.handoff import HandoffReport
from tmd.protocol.membership import Install, Member, Plan, Resolution

Phase = Literal[
    "starting",  # the process lives, the script's main has not been entered
    "building",  # main runs and has not reached its first step: cannot be rolled back
    "warming",  # shadow steps in sandbox
    "ready",  # a standby that is warm and has no role yet
    "running",  # live, in a step or between two
    "holding",  # poisoned, waits for the word to go on
    "frozen",  # a leaver after the flip: alive at its last boundary, takes part in nothing
    "finished",  # every step is committed, main goes on to its end
    "failed",  # the user's code raised; `error` has the traceback
]

#: How a joiner got its role's small state (RNG, loader position, buffers).
RecordOrigin = Literal["", "exact", "assumed", "approximate", "missing"]


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """One committed step: its number, the epoch it ran in, when the vote was decided (seconds since the Unix epoch)."""

    step: int
    epoch: int
    time_s: float


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that the daemon may know of one rank process. A newer `version` replaces an older one."""

    job_id: str
    incarnation: str
    version: int
    rank: int | None
    host: str = ""
    port: int = 0
    phase: Phase = "starting"
    #: The epoch that the main thread runs in, raised at step boundaries only.
    run_epoch: int = -1
    #: The highest epoch that this rank has been allowed to run in.
    live_epoch: int = -1
    #: Every epoch up to this one is over for this rank.
    poisoned_epoch: int = -1
    #: The step to run next: all before it are decided and will be, or are, applied here.
    next_step: int = 0
    #: Every step below this one is applied.
    applied_step: int = 0
    #: The vote on `next_step` was sent and its outcome is not known.
    unknown: bool = False
    #: For every epoch up to this one (next_step, unknown) is final until a resolution changes it.
    reported_epoch: int = -1
    #: The highest epoch whose links are open and whose state is in place.
    linked_epoch: int = -1
    #: The highest epoch whose install failed here (see `reason`).
    failed_epoch: int = -1
    #: While the links of `unreached_epoch` are opened, or when that has failed: the rank that this one dials and has not reached,
    #: -1 for none. (From protocol 1.2 on.)
    unreached_epoch: int = -1
    unreached: int = -1
    #: The main thread has not come to a boundary since its step began: until it does, this rank's state can be given to nobody.
    #: (From protocol 1.1 on.)
    in_step: bool = False
    #: True once this process holds the state of its role.
    has_state: bool = False
    #: The plan whose links are staged here, 0 for none.
    staged_plan: int = 0
    #: No plan up to this one will ever be flipped by this rank.
    dropped_plan: int = 0
    #: The plan that this rank has flipped to (last one), 0 for none.
    flipped_plan: int = 0
    #: The highest epoch in which a vote said yes here.
    committed_epoch: int = -1
    record_origin: RecordOrigin = ""
    #: How the state of its role came here last, None if it made it itself (1.3).
    handoff: HandoffReport | None = None
    #: Ranks whose links closed without the STOP frame of an orderly poison: they probably died.
    broken_ranks: tuple[int, ...] = ()
    reason: str = ""
    error: str = ""
    #: The last commits, oldest first, at most 64.
    commits: tuple[Commit, ...] = ()
    #: Moments worth showing (seconds since the Unix epoch), by name; see docs/protocol.md.
    stamps: dict[str, float] = {}
    #: Counts and sizes worth showing, by name.
    counters: dict[str, int] = {}


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """All that the daemon wants of one rank process. A newer (generation, sequence) replaces an older one."""

    job_id: str
    incarnation: str
    #: Counts the lives of the daemon (from the ledger).
    generation: int
    sequence: int
    world_size: int
    nproc_per_node: int
    #: The role to take, None for a standby.
    rank: int | None = None
    #: Every epoch up to this one is poisoned.
    poison_epoch: int = -1
    resolution: Resolution | None = None
    install: Install | None = None
    #: The word to go on: this epoch may run once its links are open.
    live_epoch: int = -1
    plan: Plan | None = None
    #: The leavers of `plan` may raise their flag in the vote.
    armed: bool = False
    #: This incarnation has been replaced for good: leave with exit code 0.
    retired: bool = False
    #: A standby takes the recorded answers of the build from this member.
    rehearse_from: Member | None = None
