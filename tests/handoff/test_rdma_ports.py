"""The port and the address that a handoff over RDMA uses, from what sysfs says. The files are made here, in its shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmd_worker.handoff.rdma_ports import Port, best, gid_for, ports, state_of, why_none

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe00:0101"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0007"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a50:0002"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"


def add_port(
    sysfs: Path,
    device: str,
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    rate: str = "100 Gb/sec (4X EDR)",
    pci: str = "pci0000:00/0000:00:01.0/0000:01:00.0",
    node: int = 0,
    gids: tuple[tuple[str, str], ...] = ((MAPPED, "RoCE v2"),),
) -> None:
    card = sysfs / "devices" / pci
    card.mkdir(parents=True)
    (card / "numa_node").write_text(f"{node}\n")
    port = sysfs / "class/infiniband" / device / "ports/1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (sysfs / "class/infiniband" / device / "device").symlink_to(card)
    for name, text in (("state", state), ("link_layer", layer), ("rate", rate)):
        (port / name).write_text(f"{text}\n")
    for index, (address, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(f"{address}\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")


def chosen(sysfs: Path, gpu: str = "", node: int = -1) -> str:
    port = best(ports(sysfs), gpu_pci=gpu and str(sysfs / "devices" / gpu), numa_node=node)
    return port.device if port else ""


def test_a_port_that_is_down_is_not_used_however_near_it_is(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", state="1: DOWN", node=1, pci="pci0000:80/0000:81:00.0")
    add_port(tmp_path, "mlx5_1", node=0, pci="pci0000:00/0000:01:00.0")
    assert chosen(tmp_path, node=1) == "mlx5_1"


def test_the_bridge_of_the_gpu_counts_before_the_numa_node_and_that_before_speed(tmp_path: Path) -> None:
    add_port(tmp_path, "far", node=1, rate="400 Gb/sec (4X NDR)", pci="pci0000:80/0000:80:01.0/0000:81:00.0")
    add_port(tmp_path, "near", node=0, rate="100 Gb/sec (4X EDR)", pci="pci0000:00/0000:00:01.0/0000:02:00.0")
    add_port(tmp_path, "nearer", node=0, rate="25 Gb/sec (1X EDR)", pci="pci0000:00/0000:00:03.0/0000:04:00.0")
    assert chosen(tmp_path, gpu="pci0000:00/0000:00:03.0/0000:05:00.0", node=1) == "nearer"
    assert chosen(tmp_path, node=0) == "near"
    assert chosen(tmp_path) == "far"


def test_a_routable_address_of_roce_v2_comes_first_and_both_ends_take_the_same_kind(tmp_path: Path) -> None:
    add_port(
        tmp_path,
        "rxe0",
        gids=((LINK_LOCAL, "RoCE v2"), (UNUSED, ""), (MAPPED, "IB/RoCE v1"), (MAPPED, "RoCE v2"), (GLOBAL, "RoCE v2")),
    )
    (port,) = ports(tmp_path)
    assert [gid.index for gid in port.gids] == [0, 2, 3, 4]
    first = gid_for(port)
    assert first is not None
    assert (first.index, first.kind) == (3, "RoCE v2 IPv4")
    routed = gid_for(port, "RoCE v2 IPv6")
    assert routed is not None
    assert routed.index == 4
    assert gid_for(port, "RoCE v3") is None


@pytest.mark.parametrize(
    ("state", "gids", "said"),
    [("1: DOWN", ((MAPPED, "RoCE v2"),), "rxe0/1 is DOWN"), ("4: ACTIVE", ((UNUSED, ""),), "rxe0/1 is ACTIVE, without address")],
)
def test_why_no_port_can_be_used_is_said(tmp_path: Path, state: str, gids: tuple[tuple[str, str], ...], said: str) -> None:
    assert "no RDMA device" in why_none(ports(tmp_path))
    add_port(tmp_path, "rxe0", state=state, gids=gids)
    found: list[Port] = ports(tmp_path)
    assert best(found) is None
    assert said in why_none(found)


def test_the_state_is_read_again_when_something_went_wrong(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0")
    (port,) = ports(tmp_path)
    (tmp_path / "class/infiniband/rxe0/ports/1/state").write_text("1: DOWN\n")
    assert (port.active, state_of(port, tmp_path)) == (True, "DOWN")
    assert state_of(Port("gone", 1, "ACTIVE", "Ethernet", 1.0, -1, "", ()), tmp_path) == ""
