"""The messages between an agent and one of its ranks, over an inherited socket pair (descriptor number in TMD_CONTROL_FD)."""

from __future__ import annotations

from typing import Literal

import msgspec

from tmd.protocol.agent import StoreReply, StoreRequest
from tmd.protocol.handoff import HandoffTerms
from tmd.protocol.rank import Directive, RankStatus

#: tmd's own links, or groups of another library.
TransportName = Literal["delta", "gloo", "nccl"]


class RankWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="rank_welcome"):
    """The first message to a rank. The job key travels here and nowhere else."""

    job_id: str
    incarnation: str
    node: str
    host: str
    rank: int | None
    local_rank: int
    world_size: int
    nproc_per_node: int
    job_key: bytes
    hold_limit_s: float
    heartbeat_s: float
    #: First and last port that the rank may listen on; None: any.
    port_range: tuple[int, int] | None = None
    #: What carries the collectives of the script's groups.
    transport: TransportName = "delta"
    #: How a role's state is handed over (1.3).
    handoff: HandoffTerms = HandoffTerms()
    #: What the agent speaks; a rank whose library is of another major version ends with the reason.
    protocol: tuple[int, int] = (1, 0)


class RankUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="rank_update"):
    """The rank's whole status, whenever it changes."""

    status: RankStatus


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, tag="rank_order"):
    """The daemon's whole wish for this rank, as its agent heard it last."""

    directive: Directive


class PeerExiting(msgspec.Struct, frozen=True, kw_only=True, tag="peer_exiting"):
    """The agent saw that another rank of this node is dying: an epoch of which it is a member cannot go on."""

    incarnation: str


FromRank = RankUpdate | StoreRequest
ToRank = RankWelcome | RankOrder | PeerExiting | StoreReply
