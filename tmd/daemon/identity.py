"""Who is at the other end, and what they may do (DESIGN.md section 11)."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Iterable

from aiohttp import web

_CREDENTIALS = struct.Struct("3i")


class UnknownUser(ValueError):
    """A configured operator does not exist on this machine."""


def peer_uid(request: web.Request) -> int | None:
    """The user at the other end of a unix socket as the kernel knows it; None if it is not one."""
    peer = request.transport.get_extra_info("socket") if request.transport is not None else None
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def peer_address(request: web.Request) -> str:
    """Where a connection over TCP comes from; empty on a unix socket."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return str(peer[0]) if isinstance(peer, tuple) else ""


def operator_uids(names: Iterable[str]) -> frozenset[int]:
    """Root, the daemon's own user and the configured ones. Raises UnknownUser."""
    uids = {0, os.geteuid()}
    for name in names:
        if name.isdigit():
            uids.add(int(name))
            continue
        try:
            uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise UnknownUser(f"daemon.operators: there is no user {name!r} on this machine") from None
    return frozenset(uids)


def user_name(uid: int) -> str:
    """For people; the number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
