"""Who may connect: mutual HMAC-SHA256 over fresh nonces, bound to everything that the connection is for. No I/O here.

The listener greets with a nonce; the dialer answers with what it wants, its own nonce and a MAC under the job key; the
listener answers with its verdict and a MAC. Nothing that a stranger sent is looked at before its MAC is verified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Any, Literal, TypeVar

import msgspec

GREETING = b"TMDL"
NONCE_BYTES = 16
GREETING_BYTES = len(GREETING) + NONCE_BYTES
MAC_BYTES = hashlib.sha256().digest_size
LENGTH = struct.Struct("!I")
#: Of the body of a hello or a verdict.
MAX_BODY_BYTES = 16 << 10
#: The kind of a connection that becomes a link between two members of a group.
LINK = "link"
#: The kind of one that only asks, by whoever waits to be dialed for a link of this group: answered with gone, or else with retry.
ASKING = "asking"


_Body = TypeVar("_Body", "Hello", "Verdict")


class HandshakeRefused(Exception):
    """What came is not from a holder of the job key, or no handshake at all."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the dialer wants. For a link: group, epoch and both ranks; for a question: group; for anything else: `fields`."""

    kind: str
    incarnation: str
    peer_incarnation: str
    nonce: bytes
    group: str = ""
    epoch: int = -1
    rank: int = -1
    peer_rank: int = -1
    #: Each direction of the memory that comes along with this, as a descriptor; 0: none does.
    ring_bytes: int = 0
    fields: dict[str, Any] = {}


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`retry`: not yet, the listener has not heard of this epoch; `refused`: final; `gone`: the listener has left this group."""

    answer: Literal["ok", "retry", "refused", "gone"]
    reason: str = ""
    #: The rank that destroyed the group, -1: the listener's own.
    by: int = -1
    #: The memory that came along will carry the frames.
    shared: bool = False


def nearby_name(key: bytes, host: str, port: int) -> bytes:
    """Where the listener of this address listens for processes of its own host: a name in Linux's abstract namespace.

    Nobody can guess it without the key, and whoever connects there goes through the same handshake.
    """
    return b"\0tmd-" + hmac.digest(key, f"tmd nearby 1 {host} {port}".encode(), "sha256").hex()[:32].encode()


def greeting() -> bytes:
    """The listener's first words, with a fresh nonce."""
    return GREETING + secrets.token_bytes(NONCE_BYTES)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def body_bytes(prefix: bytes | bytearray | memoryview) -> int:
    """How long the body is, from its length prefix. Raises HandshakeRefused."""
    (size,) = LENGTH.unpack(prefix)
    if size > MAX_BODY_BYTES:
        raise HandshakeRefused(f"a handshake of {size} bytes, the limit is {MAX_BODY_BYTES}")
    return int(size)


def seal_hello(key: bytes, greeted: bytes, hello: Hello) -> bytes:
    """The dialer's answer to the greeting."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"the fields of a {hello.kind} connection take {len(body)} bytes, the limit is {MAX_BODY_BYTES}")
    return LENGTH.pack(len(body)) + body + _mac(key, b"dialer", greeted, body)


def open_hello(key: bytes, greeted: bytes, body: bytes, mac: bytes) -> Hello:
    """Raises HandshakeRefused."""
    _verify(key, b"dialer", greeted, body, mac)
    return _decode(body, Hello)


def seal_verdict(key: bytes, greeted: bytes, hello: Hello, verdict: Verdict) -> bytes:
    body = msgspec.msgpack.encode(verdict)
    return LENGTH.pack(len(body)) + body + _mac(key, b"listener", greeted + hello.nonce, body)


def open_verdict(key: bytes, greeted: bytes, hello: Hello, body: bytes, mac: bytes) -> Verdict:
    """Raises HandshakeRefused."""
    _verify(key, b"listener", greeted + hello.nonce, body, mac)
    return _decode(body, Verdict)


def _mac(key: bytes, side: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.digest(key, b"tmd link 1 " + side + b"\0" + nonces + body, "sha256")


def _verify(key: bytes, side: bytes, nonces: bytes, body: bytes, mac: bytes) -> None:
    if not hmac.compare_digest(_mac(key, side, nonces, body), mac):
        raise HandshakeRefused("the other side does not hold this job's key")


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise HandshakeRefused(f"an authentic handshake that cannot be read: {error}") from None
