"""What a check has found."""

from __future__ import annotations

from typing import Literal

import msgspec

#: skipped: could not be looked at, or does not apply; `seen` says why.
Level = Literal["ok", "warning", "fault", "skipped"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One point of an installation: what was seen, and what to do about it if something should be done."""

    point: str
    level: Level
    seen: str
    remedy: str = ""


def ok(point: str, seen: str) -> Finding:
    return Finding(point=point, level="ok", seen=seen)


def warning(point: str, seen: str, remedy: str) -> Finding:
    """tmd works, but less well than it could, or not in every case."""
    return Finding(point=point, level="warning", seen=seen, remedy=remedy)


def fault(point: str, seen: str, remedy: str) -> Finding:
    """Something that tmd is there for does not work."""
    return Finding(point=point, level="fault", seen=seen, remedy=remedy)


def skipped(point: str, seen: str) -> Finding:
    return Finding(point=point, level="skipped", seen=seen)
