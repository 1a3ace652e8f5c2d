"""Which port of which RDMA device, and which of its addresses (GIDs), a handoff should use; read from sysfs.

Contract: only ports whose link is up count. Near is better than fast: a device below the same PCI bridge as the GPU, then one of
the NUMA node on which this process runs, then any. Of a port's GIDs a routable RoCE v2 one is taken first; two ends need the same
kind (version of RoCE, and IPv4 or IPv6), since no network carries one to the other.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

SYSFS = Path("/sys")
_INFINIBAND = "class/infiniband"
ACTIVE = "ACTIVE"
_ROCE_V2 = "RoCE v2"
ETHERNET = "Ethernet"
#: The kernel puts a new address into the first free place, so that no more than so many are ever free between two.
_GAP = 32


@dataclasses.dataclass(frozen=True)
class Gid:
    """An address of a port. `kind` is equal on two ends that can reach one another."""

    index: int
    address: str
    kind: str

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The least is the best."""
        return not self.kind.startswith(_ROCE_V2), ipaddress.IPv6Address(self.address).is_link_local, self.index


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a device. `numa_node` is -1 where the machine does not say; `pci` is the device's path below the bridges."""

    device: str
    number: int
    state: str
    link_layer: str
    rate_gbps: float
    numa_node: int
    pci: str
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def active(self) -> bool:
        return self.state == ACTIVE


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """All ports of this machine, whatever their state."""
    found = []
    for folder in sorted((sysfs / _INFINIBAND).glob("*/ports/*")):
        device = folder.parents[1]
        found.append(
            Port(
                device=device.name,
                number=int(folder.name),
                state=_text(folder / "state").partition(": ")[2],
                link_layer=_text(folder / "link_layer"),
                rate_gbps=float(_text(folder / "rate").partition(" ")[0] or 0.0),
                numa_node=int(_text(device / "device" / "numa_node") or -1),
                pci=os.path.realpath(device / "device") if (device / "device").exists() else "",
                gids=_gids(folder),
            )
        )
    return found


def state_of(port: Port, sysfs: Path = SYSFS) -> str:
    """Its state now, ACTIVE or DOWN as a rule; empty if the device is gone."""
    return _text(sysfs / _INFINIBAND / port.device / "ports" / str(port.number) / "state").partition(": ")[2]


def best(found: Sequence[Port], *, gpu_pci: str = "", numa_node: int = -1) -> Port | None:
    """The port to use, or None if no port is up and has an address. `gpu_pci`: the real path of the GPU's PCI device."""
    usable = [port for port in found if port.active and port.gids]

    def order(port: Port) -> tuple[int, bool, float, str, int]:
        shared = len(os.path.commonpath([gpu_pci, port.pci])) if gpu_pci and port.pci else 0
        return -shared, port.numa_node != numa_node, -port.rate_gbps, port.device, port.number

    return min(usable, key=order, default=None)


def gid_for(port: Port, kind: str = "") -> Gid | None:
    """The port's best GID, of this kind if one is named."""
    return min((gid for gid in port.gids if kind in ("", gid.kind)), key=lambda gid: gid.order, default=None)


def own_numa_node(sysfs: Path = SYSFS) -> int:
    """The NUMA node of all CPUs on which this process may run, or -1 if they are of several."""
    allowed = os.sched_getaffinity(0)
    nodes = {
        int(folder.name.removeprefix("node"))
        for cpu in allowed
        for folder in (sysfs / "devices/system/cpu" / f"cpu{cpu}").glob("node[0-9]*")
    }
    return nodes.pop() if len(nodes) == 1 else -1


def why_none(found: Sequence[Port]) -> str:
    """Why `best` found no port."""
    if not found:
        return "this machine has no RDMA device (nothing in /sys/class/infiniband): is its driver loaded?"
    states = ", ".join(f"{port} is {port.state or 'in no state'}{'' if port.gids else ', without address'}" for port in found)
    return f"no RDMA port is up and has an address: {states}"


def _gids(port: Path) -> tuple[Gid, ...]:
    found: list[Gid] = []
    for index in itertools.count():
        address = _text(port / "gids" / str(index))
        if not address or index > (found[-1].index if found else 0) + _GAP:
            break  # the table has an end, and is hundreds of places long
        if not int(ipaddress.IPv6Address(address)):
            continue
        family = "IPv4" if ipaddress.IPv6Address(address).ipv4_mapped else "IPv6"
        version = _text(port / "gid_attrs/types" / str(index))
        found.append(Gid(index, address, f"{version} {family}" if version == _ROCE_V2 else version or family))
    return tuple(found)


def _text(path: Path) -> str:
    """A file of sysfs; empty where the kernel has nothing to say (an unused GID's type is an error to read)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
