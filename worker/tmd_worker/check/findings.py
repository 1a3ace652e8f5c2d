"""What the check has to say, one finding at a time."""

from __future__ import annotations

import dataclasses
from typing import Literal

Severity = Literal["error", "warning"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    #: An error: it was seen to change and would be lost. A warning: it is there.
    severity: Severity
    #: It ends a run before its first step; of other errors the run only warns, since they may be meant so.
    fatal: bool = False
    #: One of kinds.KINDS, or "gradient", "refused" (a rule of tmd), "script" (the script's own failure), "check" (that of the
    #: search).
    kind: str
    #: How the script reaches it: `trainer.scaler`. Empty if it is nothing that the script holds.
    name: str = ""
    #: "a GradScaler that was not tracked changed in the shadow steps"
    what: str
    #: File and line at which the script binds it, empty if not known.
    where: str = ""
    #: What is lost when this rank is replaced.
    why: str = ""
    #: What to write.
    remedy: str = ""

    def text(self) -> str:
        """For people: one line, and up to two more."""
        subject = " ".join(part for part in (self.name, f"({self.where})" if self.where else "") if part)
        lines = [f"{self.severity}: {f'{subject}: ' if subject else ''}{self.what}"]
        lines += [f"    {label}: {line}" for label, line in (("lost with this rank", self.why), ("do", self.remedy)) if line]
        return "\n".join(lines)

    def line(self) -> str:
        """The same in one line, for an exception or a log."""
        place = f" ({self.where})" if self.where else ""
        return f"{self.name}{place}: {self.what}; lost with this rank: {self.why}; {self.remedy}"


def count(findings: list[Finding], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in findings)
