"""Which findings of health checks lead to what: the patterns of `[health]`, and what they say of one finding."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tmd.protocol.health import SEVERITIES, Finding

Action = Literal["migrate", "drain", "warn"]


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[health]`: what follows from findings of tmd-health. A pattern is CHECK or CHECK:SEVERITY (warning, error or fatal, and
    what is worse), with * for anything: gpu.*:error. Without a severity it means every one."""

    migrate: Annotated[
        tuple[str, ...],
        Meta(
            description="Findings that drain the node at once, so that its ranks move to standbys.",
        ),
    ] = ("*:fatal",)
    drain: Annotated[
        tuple[str, ...],
        Meta(
            description="Findings that drain the node as soon as no ranks of a job train on it. What neither this nor migrate "
            "names is only shown (tmctl health show) and told in the node's story.",
        ),
    ] = ("*:error",)
    trusted: Annotated[
        tuple[str, ...],
        Meta(
            description="Findings that need no second opinion, because hardware or driver say so themselves.",
        ),
    ] = ("gpu.xid:fatal", "memory.ecc:fatal")
    confirmations: Annotated[
        int,
        Meta(
            description="A finding counts once it is in this many reports of the node in a row, or another check finds fault "
            "with the same thing (gpu.xid and gpu.dcgm; a site's own check with anything)."
        ),
    ] = 2
    flapping_limit: Annotated[
        int,
        Meta(
            description="A finding that has come so often within flapping_window_s counts, although each time it went before it "
            "was confirmed; its coming and going is then told no more."
        ),
    ] = 4
    flapping_window_s: Annotated[float, Meta(description="For how long it is remembered that a finding came.")] = 3600.0


class BadPattern(ValueError):
    """A pattern that means nothing; the text says what was expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """CHECK[:SEVERITY]."""

    check: str
    #: The least severity, as an index of SEVERITIES.
    least: int

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises BadPattern."""
        check, separator, severity = text.partition(":")
        if not check or (separator and severity not in SEVERITIES):
            raise BadPattern(f"expected CHECK or CHECK:SEVERITY with {', '.join(SEVERITIES)}, got {text!r}")
        return cls(check, SEVERITIES.index(severity) if separator else 0)

    def fits(self, finding: Finding) -> bool:
        return fnmatch.fnmatchcase(finding.check, self.check) and rank(finding) >= self.least


def rank(finding: Finding) -> int:
    """How bad it is, higher is worse."""
    return SEVERITIES.index(finding.severity)


class Policy:
    """The settings, ready for use."""

    def __init__(self, settings: HealthSettings) -> None:
        """Raises BadPattern."""
        self.confirmations = settings.confirmations
        self.flapping_limit = settings.flapping_limit
        self.flapping_window_s = settings.flapping_window_s
        self._migrate = _parsed(settings.migrate)
        self._drain = _parsed(settings.drain)
        self._trusted = _parsed(settings.trusted)

    def action(self, finding: Finding) -> Action:
        if any(pattern.fits(finding) for pattern in self._migrate):
            return "migrate"
        return "drain" if any(pattern.fits(finding) for pattern in self._drain) else "warn"

    def trusts(self, finding: Finding) -> bool:
        return any(pattern.fits(finding) for pattern in self._trusted)


def _parsed(texts: Iterable[str]) -> tuple[Pattern, ...]:
    return tuple(Pattern.parse(text) for text in texts)
