"""What is known of the nodes' health, and which nodes are to be drained for it. Pure: reports go in, the journal is told what
changed, and `wanted` says what should be done by now.

A finding counts once it is confirmed: seen in several reports in a row, by a second check, by one that is trusted, or because it
keeps coming and going. It is acted upon once for each time that it comes: a node that an operator resumes meanwhile stays so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tmd.core.health_policy import Policy, rank
from tmd.core.journal import Journal
from tmd.core.views import FindingView
from tmd.protocol.health import Finding, HealthReport

#: The part of a check's name before the dot that speaks about the node as a whole.
SITE = "site"


@dataclasses.dataclass(slots=True)
class _Standing:
    """One thing that is, or lately was, wrong with a node."""

    finding: Finding
    since_s: float
    seen_s: float
    #: False: the last report that looked found it gone.
    present: bool = True
    #: Reports in a row that have it.
    in_a_row: int = 1
    #: When it came, within the window of the policy.
    came_s: list[float] = dataclasses.field(default_factory=list)
    flapping: bool = False
    #: This time the node has been drained for it.
    acted: bool = False
    told_confirmed: bool = False


class HealthBook:
    """Findings by node, check and part."""

    def __init__(self, policy: Policy, journal: Journal, *, observe_only: bool) -> None:
        self._policy = policy
        self._journal = journal
        self._observe_only = observe_only
        self._nodes: dict[str, dict[tuple[str, str], _Standing]] = {}

    def take(self, now: float, node: str, report: HealthReport) -> None:
        """A node's whole report."""
        standings = self._nodes.setdefault(node, {})
        found = {(finding.check, finding.part): finding for finding in report.findings}
        for key, finding in found.items():
            known = standings.get(key)
            if known is None or not known.present:
                standings[key] = self._came(now, node, finding, known)
            else:
                self._stayed(now, node, finding, known)
        looked = set(report.checked)
        for key, standing in list(standings.items()):
            if standing.present and key not in found and key[0] in looked:
                self._went(now, node, standing)
            if not standing.present and not self._lately(now, standing.came_s):
                self._forget(now, node, standing)
                del standings[key]
        for standing in standings.values():
            self._tell_confirmed(now, node, standing)
        if not standings:
            del self._nodes[node]

    def wanted(self, trains: Callable[[str], bool]) -> dict[str, str]:
        """Node -> why it is to be drained now. `trains`: whether ranks of a job train on a node."""
        if self._observe_only:
            return {}
        wanted = {}
        for node, standings in self._nodes.items():
            due = [each for each in standings.values() if self._due(each, standings) and self._now(each, node, trains)]
            if due:
                worst = max(due, key=lambda each: rank(each.finding))
                wanted[node] = in_words(worst.finding)
        return wanted

    def drained(self, now: float, node: str, reason: str) -> None:
        """The node has been drained for all that counts by now."""
        standings = self._nodes.get(node, {})
        for standing in standings.values():
            standing.acted = standing.acted or self._due(standing, standings)
        self._tell(now, node, f"{node} is drained: {reason}")

    def views(self) -> list[FindingView]:
        """What stands, by node."""
        return [
            FindingView(
                node=node,
                finding=each.finding,
                since_s=each.since_s,
                seen_s=each.seen_s,
                action=self._policy.action(each.finding),
                confirmed=self._confirmed(each, standings),
                flapping=each.flapping,
                acted=each.acted,
            )
            for node, standings in sorted(self._nodes.items())
            for each in standings.values()
            if each.present
        ]

    # ---------------------------------------------------------------- how a finding comes and goes

    def _came(self, now: float, node: str, finding: Finding, before: _Standing | None) -> _Standing:
        came_s = [*(self._lately(now, before.came_s) if before is not None else ()), now]
        standing = _Standing(finding, since_s=now, seen_s=now, came_s=came_s)
        standing.flapping = len(came_s) >= self._policy.flapping_limit
        if not standing.flapping:
            self._tell(now, node, in_words(finding))
        elif before is None or not before.flapping:
            self._tell(now, node, f"comes and goes, {len(came_s)} times by now: {in_words(finding)}")
        return standing

    def _stayed(self, now: float, node: str, finding: Finding, standing: _Standing) -> None:
        if rank(finding) > rank(standing.finding):
            self._tell(now, node, f"worse than before: {in_words(finding)}")
            standing.acted = standing.told_confirmed = False
            standing.in_a_row = 0
        standing.finding = finding
        standing.seen_s = now
        standing.in_a_row += 1

    def _went(self, now: float, node: str, standing: _Standing) -> None:
        standing.present = False
        if not standing.flapping:
            self._tell(now, node, f"no more: {in_words(standing.finding)}")

    def _forget(self, now: float, node: str, standing: _Standing) -> None:
        if standing.flapping:
            self._tell(now, node, f"has not come again for {self._policy.flapping_window_s:g} s: {in_words(standing.finding)}")

    def _lately(self, now: float, came_s: list[float]) -> list[float]:
        return [each for each in came_s if now - each < self._policy.flapping_window_s]

    # ---------------------------------------------------------------- whether it counts

    def _confirmed(self, standing: _Standing, standings: dict[tuple[str, str], _Standing]) -> bool:
        if standing.flapping or standing.in_a_row >= self._policy.confirmations or self._policy.trusts(standing.finding):
            return True
        return any(_supports(other, standing) for other in standings.values())

    def _due(self, standing: _Standing, standings: dict[tuple[str, str], _Standing]) -> bool:
        """It stands, counts, and nothing was done for it yet."""
        if not standing.present or standing.acted or self._policy.action(standing.finding) == "warn":
            return False
        return self._confirmed(standing, standings)

    def _now(self, standing: _Standing, node: str, trains: Callable[[str], bool]) -> bool:
        return self._policy.action(standing.finding) == "migrate" or not trains(node)

    def _tell_confirmed(self, now: float, node: str, standing: _Standing) -> None:
        """Before anything is done for it, and once each time."""
        if standing.told_confirmed or not self._due(standing, self._nodes[node]):
            return
        standing.told_confirmed = True
        migrates = self._policy.action(standing.finding) == "migrate"
        follows = (
            "the node is to be drained, its ranks move" if migrates else "the node is to be drained once no ranks train there"
        )
        would = f"tmd only observes, else {follows}" if self._observe_only else follows
        self._tell(now, node, f"counts, {would}: {in_words(standing.finding)}")

    def _tell(self, now: float, node: str, text: str) -> None:
        self._journal.tell(now, job_id="", subject=node, kind="health", text=text)


def in_words(finding: Finding) -> str:
    """One line: the check, the part, how bad, and why."""
    part = f" {finding.part}" if finding.part else ""
    return f"{finding.check}{part} {finding.severity}: {finding.reason}"


def _supports(other: _Standing, standing: _Standing) -> bool:
    """A second opinion: another check that is not content with the same thing, and not only a little."""
    about, others = (each.finding.check.partition(".")[0] for each in (standing, other))
    if other.finding.check == standing.finding.check or not other.present:
        return False
    return (rank(other.finding) >= 1 and SITE in (about, others)) or (about == others and rank(other.finding) >= 1)
