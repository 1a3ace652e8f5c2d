"""The state of the machine itself, as /sys and /proc show it: network links, disks, memory, temperatures. `root` is where these
trees are looked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tmd.protocol.health import Finding, Severity

LINKS = ("nic.link",)
DISKS = ("disk.full", "disk.readonly")
MEMORY = ("memory.size", "memory.low", "memory.ecc-count", "memory.poisoned")
HEAT = ("thermal.sensor",)

_INTERFACE_IS_UP = 0x1
#: Percent of a file system's bytes, or of its inodes, that are in use.
FULL_WARNING, FULL_ERROR = 90.0, 97.0
#: Percent of the memory that is left.
LOW_PERCENT = 1.0
#: Corrected errors since the start of the machine beyond which a module is on its way out.
CORRECTED_WARNING = 1000


# -------------------------------------------------------------------- network


def links(root: Path, wanted: Sequence[str] = ()) -> list[Finding]:
    """Cards that are switched on and have no link; `wanted` must be there and have one (`eth0`, or `mlx5_0`)."""
    found = [*_ethernet(root), *_infiniband(root)]
    there = {path.name for folder in ("net", "infiniband") for path in _listed(root / "sys/class" / folder)}
    missing = [name for name in wanted if name not in there]
    return [*found, *(_finding("nic.link", "fatal", name, "the card is not there") for name in missing)]


def _ethernet(root: Path) -> Iterator[Finding]:
    for card in _listed(root / "sys/class/net"):
        if not (card / "device").exists():
            continue  # a bridge, a tunnel, the loopback
        if not int(_text(card / "flags") or "0", 16) & _INTERFACE_IS_UP:
            continue
        if _text(card / "carrier") != "1":
            yield _finding("nic.link", "error", card.name, f"no link: it is up and {_text(card / 'operstate') or 'unknown'}")


def _infiniband(root: Path) -> Iterator[Finding]:
    """A port that nothing is plugged into (polling, or switched off) is nobody's fault."""
    for card in _listed(root / "sys/class/infiniband"):
        for port in _listed(card / "ports"):
            state, physical = _text(port / "state"), _text(port / "phys_state")
            idle = physical.startswith(("2:", "3:"))
            if not idle and state and not state.startswith("4:"):
                yield _finding("nic.link", "error", f"{card.name}/{port.name}", f"port is {state}, physically {physical}")


# -------------------------------------------------------------------- disks


def disks(root: Path, paths: Sequence[str]) -> list[Finding]:
    """File systems that are full, or that the kernel has made read-only. Raises OSError for a path that is not there."""
    return [finding for path in paths for finding in (*_full(root, path), *_read_only(root, path))]


def _full(root: Path, path: str) -> Iterator[Finding]:
    state = os.statvfs(root / path.lstrip("/"))
    for what, total, free in (("space", state.f_blocks, state.f_bavail), ("inodes", state.f_files, state.f_favail)):
        used = fullness(total, free)
        if used >= FULL_WARNING:
            severity: Severity = "error" if used >= FULL_ERROR else "warning"
            yield _finding("disk.full", severity, path, f"{used:.1f} % of its {what} are used")


def fullness(total: int, free: int) -> float:
    """Percent in use; a file system that does not count them has 0 of 0."""
    return 100.0 * (total - free) / total if total else 0.0


def _read_only(root: Path, path: str) -> Iterator[Finding]:
    for line in _text(root / "proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[1] == path and "ro" in fields[3].split(","):
            yield _finding("disk.readonly", "fatal", path, f"{fields[0]} is mounted read-only")


# -------------------------------------------------------------------- memory


def memory(root: Path, least_gib: float = 0.0) -> list[Finding]:
    """`least_gib`: what the node should have at least, 0 if nobody says."""
    kib = _meminfo(_text(root / "proc/meminfo"))
    total, free = kib.get("MemTotal", 0), kib.get("MemAvailable", 0)
    findings = list(_error_counts(root))
    if total < least_gib * (1 << 20):
        findings.append(_finding("memory.size", "fatal", "", f"{total / (1 << 20):.1f} GiB, expected at least {least_gib:g} GiB"))
    if total and 100.0 * free / total < LOW_PERCENT:
        findings.append(_finding("memory.low", "warning", "", f"{free >> 10} of {total >> 10} MiB are left"))
    if bad := kib.get("HardwareCorrupted", 0):
        findings.append(_finding("memory.poisoned", "error", "", f"{bad} KiB were taken out of use for hardware errors"))
    return findings


def _error_counts(root: Path) -> Iterator[Finding]:
    for controller in _listed(root / "sys/devices/system/edac/mc"):
        uncorrected, corrected = (int(_text(controller / name) or "0") for name in ("ue_count", "ce_count"))
        if uncorrected:
            reason = f"{uncorrected} uncorrected errors since the machine started"
            yield _finding("memory.ecc-count", "fatal", controller.name, reason)
        elif corrected >= CORRECTED_WARNING:
            reason = f"{corrected} corrected errors since the machine started"
            yield _finding("memory.ecc-count", "warning", controller.name, reason)


def _meminfo(text: str) -> dict[str, int]:
    """Name -> KiB."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: int(value.split()[0]) for name, value in pairs if value.split()}


# -------------------------------------------------------------------- temperatures


def heat(root: Path) -> list[Finding]:
    """Sensors at or above their own limits, in whole degrees Celsius; one without limits says nothing."""
    findings = []
    for chip in _listed(root / "sys/class/hwmon"):
        for sensor in sorted(chip.glob("temp*_input")):
            stem = str(sensor).removesuffix("_input")
            degrees, critical, most = (_millidegrees(Path(f"{stem}_{what}")) for what in ("input", "crit", "max"))
            name = f"{_text(chip / 'name') or chip.name}/{_text(Path(f'{stem}_label')) or Path(stem).name}"
            if degrees is None:
                continue
            if critical and degrees >= critical:
                findings.append(_finding("thermal.sensor", "fatal", name, f"{degrees:.0f} °C, critical is {critical:.0f} °C"))
            elif most and degrees >= most:
                findings.append(_finding("thermal.sensor", "warning", name, f"{degrees:.0f} °C, the limit is {most:.0f} °C"))
    return findings


def _millidegrees(path: Path) -> float | None:
    """In degrees; None if the sensor does not say."""
    text = _text(path)
    return int(text) / 1000 if text.lstrip("-").isdigit() else None


# -------------------------------------------------------------------- files


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """Without its line end; empty if it is not there or has no value (a card that is down has no carrier)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _finding(check: str, severity: Severity, part: str, reason: str) -> Finding:
    return Finding(check=check, severity=severity, part=part, reason=reason)
