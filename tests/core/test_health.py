"""What a node's findings lead to: second opinions, findings that come and go, and what an operator has settled."""

from __future__ import annotations

import pytest

from tmd.core.health import HealthBook
from tmd.core.health_policy import BadPattern, HealthSettings, Pattern, Policy
from tmd.core.journal import Journal
from tmd.protocol.health import Finding, HealthReport, Severity

NODE = "n3"


def finding(check: str = "disk.io", severity: Severity = "fatal", part: str = "sda") -> Finding:
    return Finding(check=check, severity=severity, part=part, reason="it is broken")


class Bench:
    """A book and the clock of its reports, one a minute; `trains`: whether ranks train on the node."""

    def __init__(self, *, observe_only: bool = False, **settings: object) -> None:
        self.journal = Journal(0)
        self.book = HealthBook(Policy(HealthSettings(**settings)), self.journal, observe_only=observe_only)  # type: ignore[arg-type]
        self.now = 1000.0
        self.trains = True

    def report(self, *findings: Finding, checked: tuple[str, ...] = ("disk.io", "gpu.xid", "gpu.dcgm", "site.nhc")) -> None:
        self.now += 60.0
        self.book.take(self.now, NODE, HealthReport(checked=checked, findings=findings))

    @property
    def wanted(self) -> str | None:
        """Why the node is to be drained now."""
        return self.book.wanted(lambda _: self.trains).get(NODE)

    def drain(self) -> None:
        assert self.wanted
        self.book.drained(self.now, NODE, self.wanted)

    def told(self) -> list[str]:
        """What went into the log since the last time."""
        persist = self.journal.take()
        return [event.text for event in persist.events] if persist is not None else []


# -------------------------------------------------------------------- the policy


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        ("gpu.xid", [("gpu.xid", "warning")], [("gpu.xidx", "fatal"), ("gpu", "fatal")]),
        ("gpu.*:error", [("gpu.xid", "error"), ("gpu.dcgm", "fatal")], [("gpu.xid", "warning"), ("disk.io", "fatal")]),
        ("*:fatal", [("a.b", "fatal")], [("a.b", "error")]),
        ("*", [("a.b", "warning")], []),
    ],
)
def test_patterns(pattern: str, fits: list[tuple[str, Severity]], others: list[tuple[str, Severity]]) -> None:
    parsed = Pattern.parse(pattern)
    assert all(parsed.fits(finding(*each)) for each in fits)
    assert not any(parsed.fits(finding(*each)) for each in others)


@pytest.mark.parametrize("text", ["", ":fatal", "gpu.xid:", "gpu.xid:bad", "a:b:fatal"])
def test_a_pattern_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadPattern, match="CHECK or CHECK:SEVERITY"):
        Pattern.parse(text)


@pytest.mark.parametrize(
    ("severity", "settings", "while_training", "idle"),
    [
        ("fatal", {}, True, True),
        ("error", {}, False, True),
        ("warning", {}, False, False),
        ("error", {"migrate": ("disk.io:error",)}, True, True),
        ("fatal", {"migrate": (), "drain": ()}, False, False),
        ("warning", {"drain": ("disk.*",)}, False, True),
    ],
)
def test_the_policy_decides_what_follows(
    severity: Severity, settings: dict[str, object], while_training: bool, idle: bool
) -> None:
    bench = Bench(confirmations=1, **settings)
    bench.report(finding(severity=severity))
    assert (bench.wanted is not None) == while_training
    bench.trains = False
    assert (bench.wanted is not None) == idle


def test_in_observe_only_it_says_what_it_would_do() -> None:
    bench = Bench(observe_only=True, confirmations=1)
    bench.report(finding())
    assert bench.wanted is None
    assert any("tmd only observes, else the node is to be drained" in text for text in bench.told())


# -------------------------------------------------------------------- a second opinion


def test_a_finding_counts_after_so_many_reports_in_a_row() -> None:
    bench = Bench(confirmations=3)
    bench.report(finding())
    bench.report(finding())
    assert bench.wanted is None
    bench.report()
    bench.report(finding())
    bench.report(finding())
    assert bench.wanted is None, "it begins anew"
    bench.report(finding())
    assert bench.wanted == "disk.io sda fatal: it is broken"


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (finding("gpu.dcgm", "error", "GPU/3"), True),
        (finding("site.nhc", "error", "check_nvsmi"), True),
        (finding("gpu.dcgm", "warning", "GPU/3"), False),
        (finding("disk.full", "fatal", "/"), False),
        (finding("gpu.xid", "fatal", "0000:af:00"), False),
    ],
)
def test_a_second_check_that_agrees_is_enough(other: Finding, counts: bool) -> None:
    bench = Bench(trusted=(), drain=(), migrate=("gpu.xid",))
    bench.report(finding("gpu.xid", "fatal", "0000:3b:00"), other)
    assert (bench.wanted is not None) == counts


def test_what_hardware_says_itself_needs_no_second_opinion() -> None:
    bench = Bench()
    bench.report(finding("gpu.xid", "error"))
    assert bench.wanted is None
    bench.report(finding("gpu.xid", "fatal"))
    assert bench.wanted is not None


def test_what_was_not_looked_at_still_stands() -> None:
    """A check that hung says nothing, so nothing is healthy that was not before."""
    bench = Bench()
    bench.report(finding())
    bench.report(checked=("gpu.xid",))
    assert [view.finding.check for view in bench.book.views()] == ["disk.io"]
    bench.report(finding())
    assert bench.wanted is not None
    bench.report(checked=("disk.io",))
    assert bench.book.views() == []


# -------------------------------------------------------------------- what comes and goes


def test_what_keeps_coming_and_going_counts_in_the_end() -> None:
    bench = Bench(flapping_limit=3)
    for _ in range(2):
        bench.report(finding())
        bench.report()
    assert bench.wanted is None
    bench.report(finding())
    assert bench.wanted is not None
    assert bench.book.views()[0].flapping


def test_coming_and_going_is_told_until_it_is_known_for_it() -> None:
    bench = Bench(flapping_limit=3, migrate=(), drain=())
    for _ in range(2):
        bench.report(finding())
        bench.report()
    assert [text.split(":")[0] for text in bench.told()] == ["disk.io sda fatal", "no more"] * 2
    bench.report(finding())
    assert [text.split(":")[0] for text in bench.told()] == ["comes and goes, 3 times by now"]
    for _ in range(20):
        bench.report()
        bench.report(finding())
    assert bench.told() == []


def test_what_came_long_ago_is_forgotten() -> None:
    bench = Bench(flapping_limit=3, flapping_window_s=600.0)
    for _ in range(5):
        bench.report(finding())
        bench.report()
        bench.now += 600.0
        bench.report()
    assert bench.wanted is None
    assert bench.book.views() == []


def test_one_that_was_known_to_come_and_go_is_told_of_when_it_stays_away() -> None:
    bench = Bench(flapping_limit=2, flapping_window_s=600.0)
    for _ in range(2):
        bench.report(finding())
        bench.report()
    bench.told()
    bench.now += 600.0
    bench.report()
    assert bench.told() == ["has not come again for 600 s: disk.io sda fatal: it is broken"]


# -------------------------------------------------------------------- what was done


def test_a_finding_is_acted_upon_once_for_each_time_that_it_comes() -> None:
    """So that a node that an operator resumes in spite of it stays so."""
    bench = Bench(confirmations=1)
    bench.report(finding())
    bench.drain()
    assert bench.wanted is None
    bench.report(finding())
    assert bench.wanted is None
    assert bench.book.views()[0].acted
    bench.report()
    bench.report(finding())
    assert bench.wanted is not None


def test_what_gets_worse_is_judged_anew() -> None:
    bench = Bench(confirmations=2, migrate=("*:fatal",), drain=("*:error",))
    bench.report(finding(severity="error"))
    bench.report(finding(severity="error"))
    bench.trains = False
    bench.drain()
    bench.trains = True
    bench.report(finding(severity="fatal"))
    bench.report(finding(severity="fatal"))
    assert bench.wanted is not None


def test_a_drain_that_waited_is_off_if_the_finding_goes() -> None:
    bench = Bench(confirmations=1)
    bench.report(finding(severity="error"))
    bench.report()
    bench.trains = False
    assert bench.wanted is None


def test_the_log_has_what_changed_and_no_more() -> None:
    bench = Bench()
    for _ in range(4):
        bench.report(finding())
    bench.drain()
    bench.report(finding())
    bench.report()
    assert bench.told() == [
        "disk.io sda fatal: it is broken",
        "counts, the node is to be drained, its ranks move: disk.io sda fatal: it is broken",
        "n3 is drained: disk.io sda fatal: it is broken",
        "no more: disk.io sda fatal: it is broken",
    ]


def test_the_worst_finding_gives_the_reason() -> None:
    bench = Bench(confirmations=1, migrate=("*",))
    bench.report(finding("a.b", "warning"), finding("c.d", "fatal"), finding("e.f", "error"), checked=("a.b", "c.d", "e.f"))
    assert bench.wanted == "c.d sda fatal: it is broken"
    bench.drain()
    assert bench.wanted is None
