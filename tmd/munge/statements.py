"""Statements in credentials: what tmd.protocol.proofs defines, made and checked. Blocking, as tmd.munge.library."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from tmd.munge.library import CredentialRefused, Munge
from tmd.protocol.proofs import Proof

_Statement = TypeVar("_Statement", bound=msgspec.Struct)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Proof)


def state(munge: Munge, statement: Proof, *, for_uid: int | None = None) -> str:
    """A credential in which this process's user says so; with `for_uid` for that user's eyes only. Raises MungeError."""
    return munge.encode(_ENCODER.encode(statement), for_uid=for_uid)


def read(munge: Munge, credential: str, kind: type[_Statement]) -> tuple[_Statement, int]:
    """The statement, and the uid of whoever made it. Raises MungeDown; CredentialRefused, also for another purpose."""
    decoded = munge.decode(credential)
    statement: Proof | None = None
    with contextlib.suppress(msgspec.DecodeError):
        statement = _DECODER.decode(decoded.payload)
    if not isinstance(statement, kind):
        raise CredentialRefused(
            "wrong purpose",
            f"the credential of uid {decoded.uid} was made for another purpose than {kind.__struct_config__.tag!r}",
            "both sides need the same version of tmd; if they have it, somebody uses a credential of another thing",
        )
    return statement, decoded.uid
