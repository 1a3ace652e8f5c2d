"""Which sockets a process holds, and where they lead: read from /proc, as an administrator would see them."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

_ESTABLISHED, _LISTEN = "01", "0A"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Connection:
    """One end of a TCP connection, as the process that holds it sees it."""

    pid: int
    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int]


def connections(pid: int) -> set[Connection]:
    """Established TCP connections of this process."""
    table = _tcp_table(_ESTABLISHED)
    return {Connection(pid, descriptor, *table[inode]) for descriptor, inode in _socket_inodes(pid).items() if inode in table}


def between(pids: set[int]) -> set[Connection]:
    """Both ends of every connection between two of these processes."""
    found = set().union(*map(connections, pids))
    ends = {each.local for each in found}
    return {each for each in found if each.remote in ends}


def local_sockets(pids: set[int]) -> set[tuple[int, int, str]]:
    """(process, descriptor, inode) of every socket within the host: links between ranks of one node are such."""
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    held = {(pid, descriptor, inode) for pid in pids for descriptor, inode in _socket_inodes(pid).items()}
    return {each for each in held if each[2] in inodes}


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    table = _tcp_table(_LISTEN)
    return {table[inode][0] for inode in _socket_inodes(pid).values() if inode in table}


def _socket_inodes(pid: int) -> dict[int, str]:
    """Descriptor -> inode."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found[int(entry.name)] = target.removeprefix("socket:[").removesuffix("]")
    return found


def _tcp_table(state: str) -> dict[str, tuple[tuple[str, int], tuple[str, int]]]:
    """Inode -> local and remote address."""
    table = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                table[fields[9]] = (_address(family, fields[1]), _address(family, fields[2]))
    return table


def _address(family: socket.AddressFamily, text: str) -> tuple[str, int]:
    """The kernel prints each 32-bit word in the machine's byte order."""
    words, port = text.split(":")
    raw = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return socket.inet_ntop(family, raw).removeprefix("::ffff:"), int(port, 16)
