"""Who is at the other end, and what they may do (DESIGN.md section 11)."""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web

_CREDENTIALS = struct.Struct("3i")
#: Who asks over TCP, once that is proven.
PROVEN_UID = "tmd_proven_uid"
#: Whose file names the user that Slurm's controller runs as.
SLURM_CONF = Path("/etc/slurm/slurm.conf")


class UnknownUser(ValueError):
    """A configured operator does not exist on this machine."""


def peer_uid(request: web.Request) -> int | None:
    """The user at the other end of a unix socket as the kernel knows it; None if it is not one."""
    peer = request.transport.get_extra_info("socket") if request.transport is not None else None
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def caller_uid(request: web.Request) -> int | None:
    """Who asks: as proven over TCP, as the kernel says on a unix socket; None if nobody can tell."""
    proven: int | None = request.get(PROVEN_UID)
    return proven if proven is not None else peer_uid(request)


def peer_address(request: web.Request) -> str:
    """Where a connection over TCP comes from; empty on a unix socket."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return str(peer[0]) if isinstance(peer, tuple) else ""


def machine(request: web.Request) -> str:
    """On which machine the other end of a connection is: its address there, empty for this one."""
    peer = peer_address(request)
    if not peer or request.transport is None:
        return ""
    address = ipaddress.ip_address(peer.partition("%")[0])
    loopback = (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return "" if loopback or peer == request.transport.get_extra_info("sockname")[0] else peer


def operators(names: Iterable[str]) -> frozenset[int]:
    """Who may do all: `operator_uids` and the user that Slurm's controller runs as. Raises UnknownUser."""
    slurm = slurm_user_uid()
    return operator_uids(names) | ({slurm} if slurm is not None else set())


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


def slurm_user_uid(file: Path | None = None) -> int | None:
    """Who Slurm's controller runs as, by slurm.conf ($SLURM_CONF, else /etc/slurm); None if the file does not say."""
    path = file or Path(os.environ.get("SLURM_CONF") or SLURM_CONF)
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.findall(r"^\s*SlurmUser\s*=\s*([^\s#]+)", text, re.MULTILINE | re.IGNORECASE)
    if not found:
        return None
    name = found[-1].partition("(")[0]
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """For people; the number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
