"""/sys and /proc of machines in trouble, as trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmd.protocol.health import Finding
from tmd_worker.health import machine


def tree(folder: Path, **files: str) -> Path:
    """Files by path with __ for /."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return folder


def short(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.check, each.part, each.severity) for each in findings]


def card(name: str, *, flags: str, carrier: str, state: str, device: bool = True) -> dict[str, str]:
    base = f"sys__class__net__{name}"
    files = {f"{base}__flags": flags, f"{base}__carrier": carrier, f"{base}__operstate": state}
    return files | ({f"{base}__device__vendor": "0x15b3"} if device else {})


def test_cards_without_a_link(tmp_path: Path) -> None:
    """Only those that are real and switched on."""
    root = tree(
        tmp_path,
        **card("eth0", flags="0x1003", carrier="1", state="up"),
        **card("eth1", flags="0x1003", carrier="0", state="down"),
        **card("eth2", flags="0x1002", carrier="0", state="down"),
        **card("br0", flags="0x1003", carrier="0", state="down", device=False),
        sys__class__infiniband__mlx5_0__ports__1__state="4: ACTIVE",
        sys__class__infiniband__mlx5_0__ports__1__phys_state="5: LinkUp",
        sys__class__infiniband__mlx5_1__ports__1__state="2: INIT",
        sys__class__infiniband__mlx5_1__ports__1__phys_state="5: LinkUp",
        sys__class__infiniband__mlx5_2__ports__1__state="1: DOWN",
        sys__class__infiniband__mlx5_2__ports__1__phys_state="3: Disabled",
    )
    assert short(machine.links(root)) == [("nic.link", "eth1", "error"), ("nic.link", "mlx5_1/1", "error")]
    assert short(machine.links(root, ["eth0", "mlx5_0", "mlx5_7"]))[2:] == [("nic.link", "mlx5_7", "fatal")]


def test_memory_that_is_short_or_broken(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__meminfo="MemTotal:       1056000000 kB\nMemFree: 1 kB\nMemAvailable:    9000000 kB\n"
        "HardwareCorrupted:     4 kB\nHugePages_Total:       0",
        sys__devices__system__edac__mc__mc0__ue_count="0",
        sys__devices__system__edac__mc__mc0__ce_count="1200",
        sys__devices__system__edac__mc__mc1__ue_count="1",
        sys__devices__system__edac__mc__mc1__ce_count="0",
        sys__devices__system__edac__mc__mc2__ue_count="0",
        sys__devices__system__edac__mc__mc2__ce_count="3",
    )
    always = [("memory.ecc-count", "mc0", "warning"), ("memory.ecc-count", "mc1", "fatal")]
    assert short(machine.memory(root)) == [*always, ("memory.low", "", "warning"), ("memory.poisoned", "", "error")]
    assert ("memory.size", "", "fatal") in short(machine.memory(root, least_gib=1010))
    assert ("memory.size", "", "fatal") not in short(machine.memory(root, least_gib=1000))


def test_sensors_by_their_own_limits(tmp_path: Path) -> None:
    chip = "sys__class__hwmon__hwmon0__"
    temperatures = {1: ("45000", "100000", "90000"), 2: ("91000", "100000", "90000"), 3: ("100000", "100000", "90000")}
    files = {
        f"{chip}temp{number}_{what}": text
        for number, row in temperatures.items()
        for what, text in zip(("input", "crit", "max"), row, strict=True)
    }
    root = tree(tmp_path, **files, **{f"{chip}temp4_input": "120000", f"{chip}name": "coretemp", f"{chip}temp3_label": "Core 2"})
    assert short(machine.heat(root)) == [
        ("thermal.sensor", "coretemp/temp2", "warning"),
        ("thermal.sensor", "coretemp/Core 2", "fatal"),
    ]


@pytest.mark.parametrize(("total", "free", "percent"), [(100, 100, 0.0), (100, 3, 97.0), (100, 0, 100.0), (0, 0, 0.0)])
def test_how_full_a_disk_is(total: int, free: int, percent: float) -> None:
    assert machine.fullness(total, free) == percent


def test_a_disk_that_the_kernel_made_read_only(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__mounts="/dev/sda2 / ext4 rw,relatime 0 0\n/dev/sdb1 /scratch xfs ro,noatime 0 0")
    (root / "scratch").mkdir()
    found = short(machine.disks(root, ["/", "/scratch"]))
    assert [each for each in found if each[0] == "disk.readonly"] == [("disk.readonly", "/scratch", "fatal")]


def test_a_machine_that_tells_nothing_has_no_findings(tmp_path: Path) -> None:
    assert machine.links(tmp_path) == machine.memory(tmp_path) == machine.heat(tmp_path) == []


def test_a_path_that_is_not_there_is_no_healthy_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        machine.disks(tmp_path, ["/scratch"])
