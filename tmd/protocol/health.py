"""What a compute node's health check tells the daemon: each time all that is wrong, so a report that is lost is made good by the
next."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: warning: look at it some day. error: work on this node is at risk. fatal: it is broken.
Severity = Literal["warning", "error", "fatal"]
SEVERITIES: tuple[Severity, ...] = ("warning", "error", "fatal")

#: "gpu.xid": what the check is about, then which. Findings about the same thing support each other.
CheckName = Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,32}\.[A-Za-z0-9_.-]{1,64}$")]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a node."""

    check: CheckName
    severity: Severity
    reason: Annotated[str, Meta(max_length=500)]
    #: Which of several like parts: a device, an interface, a path. Empty: the node as a whole.
    part: Annotated[str, Meta(max_length=128)] = ""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/nodes/NODE/findings."""

    #: The checks that came to an end. What another one found before still stands: not looked at is not healthy.
    checked: Annotated[tuple[CheckName, ...], Meta(max_length=256)]
    findings: Annotated[tuple[Finding, ...], Meta(max_length=256)] = ()
