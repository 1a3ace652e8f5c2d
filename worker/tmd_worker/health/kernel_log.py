"""What the kernel's log says of broken hardware: GPUs (Xid), memory (EDAC, machine checks), PCIe, disks, network cards, heat.

Records are those of /dev/kmsg: "priority,sequence,microseconds,flags;message", with a space before continuation lines, and
bytes that are no text as \\xNN. The meanings of Xid numbers are those of NVIDIA's catalogue of Xid errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tmd.protocol.health import SEVERITIES, Finding, Severity

#: More than the largest kernel log buffers hold.
LOG_LIMIT_BYTES = 64 << 20
_RECORD_LIMIT_BYTES = 8192

#: 48 double bit error, 64 row remapping failed, 79 fallen off the bus, 95 uncontained memory error, 119 and 120 the
#: GPU's own processor does not answer, 140 uncorrected memory error.
_FATAL_XIDS = frozenset({48, 64, 79, 95, 119, 120, 140})
#: 63 a row was remapped, 74 NVLink, 92 many single bit errors, 94 contained memory error.
_SERIOUS_XIDS = frozenset({63, 74, 92, 94})
#: What a faulty program causes: 13 and 31 bad access, 43 and 45 the work of a program was stopped.
_PROGRAM_XIDS = frozenset({13, 31, 43, 45})


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """`pattern` finds the message; its group `part` is what it is about. `severity` of a match, None: nothing is wrong."""

    check: str
    pattern: re.Pattern[str]
    severity: Callable[[re.Match[str]], Severity | None]


def _always(severity: Severity) -> Callable[[re.Match[str]], Severity | None]:
    return lambda _: severity


def _xid(match: re.Match[str]) -> Severity | None:
    number = int(match["xid"])
    if number in _PROGRAM_XIDS:
        return None
    return "fatal" if number in _FATAL_XIDS else "error" if number in _SERIOUS_XIDS else "warning"


def _by_word(**severities: Severity) -> Callable[[re.Match[str]], Severity | None]:
    """By the match's group `word`, in lower case with nothing but letters."""
    return lambda match: severities[re.sub("[^a-z]", "", match["word"].lower())]


def _rule(check: str, pattern: str, severity: Callable[[re.Match[str]], Severity | None]) -> _Rule:
    return _Rule(check, re.compile(pattern, re.DOTALL), severity)


RULES: Sequence[_Rule] = (
    _rule("gpu.xid", r"NVRM: Xid \(PCI:(?P<part>[0-9a-fA-F:.]+)\): (?P<xid>\d+)", _xid),
    _rule("gpu.xid", r"NVRM: The NVIDIA GPU (?P<part>[0-9a-f:.]+).*fallen off the bus", _always("fatal")),
    _rule("memory.ecc", r"EDAC (?P<part>MC\d+): \d+ (?P<word>CE|UE) ", _by_word(ce="warning", ue="fatal")),
    _rule(
        "memory.ecc",
        r"\[Hardware Error\]: (?P<word>Uncorrected|Corrected|Deferred) error",
        _by_word(corrected="warning", deferred="error", uncorrected="fatal"),
    ),
    _rule("memory.poison", r"Memory failure: (?P<part>0x[0-9a-f]+): ", _always("error")),
    _rule("memory.oom", r"^Out of memory: Killed process", _always("warning")),
    _rule("cpu.machine-check", r"mce: \[Hardware Error\]: (?P<part>CPU \d+): Machine Check( Exception)?:", _always("error")),
    _rule("cpu.machine-check", r"mce: \[Hardware Error\]: Machine check events logged", _always("warning")),
    _rule(
        "cpu.machine-check",
        r"\[Hardware Error\]: event severity: (?P<word>corrected|recoverable|fatal)",
        _by_word(corrected="warning", recoverable="error", fatal="fatal"),
    ),
    _rule("cpu.stall", r"soft lockup - (?P<part>CPU#\d+)|rcu: INFO: rcu_\w+ (self-)?detected stall", _always("error")),
    _rule("thermal.throttle", r"(?P<part>CPU\d+): (Core|Package) temperature( is)? above threshold", _always("warning")),
    _rule(
        "pcie.error",
        r"(?P<part>[0-9a-f]{4}:[0-9a-f:.]+): PCIe Bus Error: severity=(?P<word>Corrected|Uncorrected \((Non-)?Fatal\)),",
        _by_word(corrected="warning", uncorrectednonfatal="error", uncorrectedfatal="fatal"),
    ),
    _rule("nic.firmware", r"mlx5_core (?P<part>[0-9a-f:.]+): .*device's health compromised", _always("fatal")),
    _rule("disk.io", r"I/O error, dev (?P<part>\w+), sector", _always("error")),
    _rule("disk.io", r"nvme (?P<part>nvme\d+): (I/O .*timeout|controller is down)", _always("error")),
    _rule("disk.filesystem", r"EXT4-fs error \(device (?P<part>[\w-]+)\)", _always("error")),
    _rule("disk.filesystem", r"EXT4-fs \((?P<part>[\w-]+)\): Remounting filesystem read-only", _always("fatal")),
    _rule("disk.filesystem", r"XFS \((?P<part>[\w-]+)\): .*[Ss]hutting down filesystem", _always("fatal")),
)
COVERS = tuple(sorted({rule.check for rule in RULES}))


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    age_s: float
    text: str


def look(root: Path, since_s: float) -> list[Finding]:
    """What the log of the last `since_s` seconds tells. Raises OSError if the log cannot be read."""
    uptime_s = float((root / "proc" / "uptime").read_text().split()[0])
    return judge(record for record in records(_content(root / "dev" / "kmsg"), uptime_s) if record.age_s <= since_s)


def records(content: str, uptime_s: float) -> Iterator[Record]:
    """What /dev/kmsg gave, a record for each message."""
    for line in content.splitlines():
        prefix, separator, text = line.partition(";")
        fields = prefix.split(",")
        if line.startswith(" ") or not separator or len(fields) < 3 or not fields[2].isdigit():
            continue
        unescaped = re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text)
        yield Record(uptime_s - int(fields[2]) / 1e6, unescaped)


def judge(messages: Iterator[Record]) -> list[Finding]:
    """One finding for each check and part: the worst that was said, the newest of these, and how often."""
    worst: dict[tuple[str, str], tuple[Severity, Record]] = {}
    times: dict[tuple[str, str], int] = {}
    for record in messages:
        found = next(((rule, match) for rule in RULES if (match := rule.pattern.search(record.text)) is not None), None)
        if found is None:
            continue
        rule, match = found
        severity = rule.severity(match)
        if severity is None:
            continue
        key = (rule.check, (match.groupdict().get("part") or "").replace(" ", ""))
        times[key] = times.get(key, 0) + 1
        before = worst.get(key)
        if before is None or SEVERITIES.index(severity) >= SEVERITIES.index(before[0]):
            worst[key] = (severity, record)
    return [
        Finding(check=check, part=part, severity=severity, reason=f"{_one_line(record.text)} ({times[check, part]} in the log)")
        for (check, part), (severity, record) in worst.items()
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _content(path: Path) -> str:
    """All that is there now: the device gives a record with each read, and would wait for the next one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    parts: list[bytes] = []
    size = 0
    try:
        with contextlib.suppress(BlockingIOError):
            while size < LOG_LIMIT_BYTES:
                try:
                    part = os.read(descriptor, _RECORD_LIMIT_BYTES)
                except BrokenPipeError:  # what comes next was overwritten meanwhile; reading goes on behind it
                    continue
                if not part:
                    break
                parts.append(part)
                size += len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")
