"""Which address and which ports of this machine the ranks of a node listen on.

Contract: what comes out is a numeric address that this machine has. A name is resolved once, here, so that all ranks of the node
agree; resolvers and host tables may lie, so it is tried whether the address can be bound. What cannot work is refused before
any rank starts, and the refusal lists what there is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tmd_worker.agent.settings import DaemonAddress, SettingsRefused

#: The request for an interface's IPv4 address: a name in, a `struct ifreq` out, in which the address begins at byte 20.
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 40
_LONGEST_NAME_BYTES = 15
_IPV6_TABLE = Path("/proc/net/if_inet6")
#: In that table: valid on one link only, so of no meaning to other machines.
_LINK_SCOPE = 0x20
_LAST_PORT = 65535


def resolve_host(given: str | None, interface: str | None, daemon: DaemonAddress) -> str:
    """The address by a name or a number, else by an interface, else the one from which the daemon is reached.

    Raises SettingsRefused, also if both are given.
    """
    if given and interface:
        raise SettingsRefused(f"--host {given} and --interface {interface} both choose an address; leave one of them out")
    if interface:
        return _address_of(interface)
    if not given:
        return daemon.own_address()
    number = _number(given)
    return _own_by_name(given, daemon.own_address) if number is None else _own_number(given, number)


def resolve_port_range(given: str | None, nproc_per_node: int) -> tuple[int, int] | None:
    """First and last port. Raises SettingsRefused if they are no range, or too few for the ranks of this node."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", given.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= _LAST_PORT:
        raise SettingsRefused(f"--port-range {given!r} is not understood; say FIRST-LAST, at most {_LAST_PORT}: 41000-41063")
    if last - first + 1 < nproc_per_node:
        raise SettingsRefused(
            f"--port-range {given} has {last - first + 1} ports for {nproc_per_node} ranks, and each listens on one; widen it"
        )
    return first, last


# -------------------------------------------------------------------- by number or name


def _number(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: it is a name."""
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _own_number(given: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if address.is_unspecified:
        raise SettingsRefused(f"--host {given} is every address, and peers must be told one; this machine has {_there_is()}")
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        raise SettingsRefused(f"--host {given} is valid on one link only; peers need one of another kind: {_there_is()}")
    if not _is_own(str(address)):
        raise SettingsRefused(f"--host {given} is no address of this machine, which has {_there_is()}")
    return str(address)


def _own_by_name(name: str, way_to_daemon: Callable[[], str]) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsRefused(
            f"--host {name!r} cannot be resolved ({error}); give an address, or --interface; this machine has {_there_is()}"
        ) from None
    # Sorted: IPv4 first. With a fourth member that is not 0, an address is valid on one link only.
    resolved = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0]) if not any(entry[4][3:])]
    own = [address for address in resolved if _is_own(address)]
    if not own:
        raise SettingsRefused(
            f"--host {name!r} resolves to {', '.join(resolved) or 'nothing usable'}, which this machine does not have: it is "
            "another machine's name, or what resolves it is wrong; give an address, or --interface; this machine has "
            f"{_there_is()}"
        )
    for address in own:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    if not ipaddress.ip_address(way_to_daemon()).is_loopback:
        raise SettingsRefused(
            f"--host {name!r} resolves to {own[0]}, which no other machine can reach (often a line in /etc/hosts); "
            f"give an address, or --interface; this machine has {_there_is()}"
        )
    return own[0]


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


# -------------------------------------------------------------------- by interface


def interfaces() -> dict[str, list[str]]:
    """Of this machine: the addresses of each, IPv4 first, without those that are valid on one link only."""
    found = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def _address_of(interface: str) -> str:
    found = interfaces()
    if interface not in found:
        raise SettingsRefused(f"--interface {interface}: this machine has none of that name, but {_there_is()}")
    if not found[interface]:
        raise SettingsRefused(f"--interface {interface} has no address that peers could reach; this machine has {_there_is()}")
    return found[interface][0]


def _ipv4(interface: str) -> list[str]:
    """Its first address, if it has one."""
    request = struct.pack(f"{_IFREQ_BYTES}s", interface.encode()[:_LONGEST_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6() -> list[tuple[str, str]]:
    """(interface, address); nothing where the kernel has no IPv6."""
    try:
        lines = _IPV6_TABLE.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if int(row[3], 16) != _LINK_SCOPE]


def _there_is() -> str:
    """For people."""
    parts = [f"{name} ({', '.join(addresses)})" for name, addresses in interfaces().items() if addresses]
    return ", ".join(parts) or "no interface with an address"
