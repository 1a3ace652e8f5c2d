"""What is said about the transfer of a role's state: how it may go (to agents and ranks), and how it went (from a joiner)."""

from __future__ import annotations

from typing import Literal

import msgspec

#: auto: the best that both ends can use. rdma, tcp: this one or none.
TransferMode = Literal["auto", "rdma", "tcp"]


class HandoffTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every process of a daemon's jobs (1.3)."""

    transport: TransferMode = "auto"
    #: Folder on the compute nodes with what TLS needs; empty: data over tcp is not encrypted.
    tls: str = ""


class HandoffSource(msgspec.Struct, frozen=True, kw_only=True):
    """What one source brought by one transport (1.3)."""

    rank: int
    node: str
    transport: str
    #: Of tensors, repeated ones too.
    size_bytes: int


class HandoffReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a joiner got the state of its role (1.3)."""

    #: What the ends agreed on; several, where that differs between its sources.
    transport: str
    #: Why this one, and what became of it: sentences for people.
    why: str
    #: The rank, or ranks, that it came from, each with its node.
    source: str
    #: Bytes of the tensors by the transport that moved them, repeated ones too.
    bytes_by_transport: dict[str, int] = {}
    #: Seconds of each part of the pause, in order.
    parts_s: dict[str, float] = {}
    #: The same bytes by where they came from. Empty: told by a joiner that knows only one source.
    sources: tuple[HandoffSource, ...] = ()
