"""How state is handed over, as an operator says it. The descriptions become etc/tmd.toml and the tables of docs/operators.md."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tmd.protocol.handoff import HandoffTerms, TransferMode


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[handoff]`: how the state of a role comes to the standby that takes it over."""

    transport: Annotated[
        TransferMode,
        Meta(
            description="What moves the bytes. auto: the best that both ends can use; why it was not a better one is shown with "
            "each migration. rdma or tcp: this one or none; a rank that cannot use it ends as it starts, with the reason. "
            "A transfer that breaks goes on over tcp in any case. Ranks learn of a change when they are started."
        ),
    ] = "auto"
    tls: Annotated[
        str,
        Meta(
            description="Folder on every compute node with certificate.pem, key.pem and authority.pem (who has signed the "
            "certificates), readable by the job's user: states that go over tcp are then encrypted. Names in certificates are "
            "not looked at, since the job's key has proven who a peer is.",
            extra={"default": "none: not encrypted", "example": '"/etc/tmd/handoff"'},
        ),
    ] = ""

    def terms(self) -> HandoffTerms:
        return HandoffTerms(transport=self.transport, tls=self.tls)
