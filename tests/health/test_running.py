"""Checks that hang, die or talk rubbish cost their own deadline and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.health.programs import program
from tmd.protocol.health import Finding
from tmd_worker.health import site
from tmd_worker.health.running import Check, run

GOOD = Finding(check="a.b", severity="warning", reason="r")


ROOT = Path(__file__).parents[2]


def hang() -> list[Finding]:
    signal.pause()
    return []


def test_each_check_says_what_it_found(tmp_path: Path) -> None:
    checked, findings = run([Check("one", ("a.b",), lambda: [GOOD]), Check("two", ("c.d", "c.e"), lambda: [])])
    assert set(checked) >= {"a.b", "c.d", "c.e"}
    assert findings == [GOOD]


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = program(tmp_path, f'echo $$ > {started}; trap "" TERM HUP; while true; do sleep 1000 & wait; done')

    def look() -> list[Finding]:
        subprocess.run([script], check=False)
        return []

    began_s = time.monotonic()
    checks = [Check("hangs", ("h.h",), look, timeout_s=0.7), Check("good", ("a.b",), lambda: [GOOD])]
    checked, findings = run(checks)
    assert time.monotonic() - began_s < 30
    assert ("a.b" in checked, "h.h" in checked) == (True, False)
    (overdue,) = (each for each in findings if each.check == "health.deadline")
    assert (overdue.part, overdue.severity, "within 0.7 s" in overdue.reason) == ("hangs", "error", True)
    pid = int(started.read_text())
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "what the check started is left behind"
        time.sleep(0.01)


def test_all_together_have_a_deadline_too() -> None:
    checked, findings = run([Check(f"hangs{n}", (f"h.{n}",), hang, timeout_s=50.0) for n in range(3)], total_s=0.3)
    assert [each.check for each in findings] == ["health.deadline"] * 3
    assert not {f"h.{n}" for n in range(3)} & set(checked)


def test_one_that_breaks_is_a_finding_and_says_nothing_of_the_node() -> None:
    def breaks() -> list[Finding]:
        raise OSError("no such sensor")

    def dies() -> list[Finding]:
        os._exit(3)

    checked, findings = run([Check("breaks", ("b.b",), breaks), Check("dies", ("d.d",), dies)])
    reasons = {each.part: each.reason for each in findings}
    assert {each.check for each in findings} == {"health.broken"}
    assert ("no such sensor" in reasons["breaks"], "died" in reasons["dies"]) == (True, True)
    assert not {"b.b", "d.d"} & set(checked)


def test_it_starts_without_what_takes_long_to_load() -> None:
    heavy = {"torch", "numpy", "aiohttp", "click", "sqlalchemy"}
    code = f"import sys, tmd_worker.health.main; print(sorted({heavy} & set(sys.modules)))"
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/worker"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=path)
    assert done.stdout.strip() == "[]"


def test_nhc_tells_its_first_failure_and_marks_nothing_offline(tmp_path: Path) -> None:
    nhc = program(
        tmp_path,
        f'echo "$@" > {tmp_path}/arguments\n'
        'echo "ERROR:  nhc:  Health check failed:  check_fs_mount:  /scratch not mounted" >&2; exit 1',
    )
    (finding,) = site.look_nhc(nhc)
    assert (finding.check, finding.part, finding.reason) == ("site.nhc", "check_fs_mount", "/scratch not mounted")
    assert "MARK_OFFLINE=0" in (tmp_path / "arguments").read_text()
    assert site.look_nhc(program(tmp_path, "exit 0")) == []
    (odd,) = site.look_nhc(program(tmp_path, "echo; echo what; exit 7"))
    assert odd.reason == "ended with code 7: what"


def test_dcgm_by_its_report(tmp_path: Path) -> None:
    """The report's shape is taken from its documentation; no GPU is here."""
    report = (
        '{"header": ["Health Monitor Report"], "body": {"Overall Health": {"value": "Failure"}, "GPU": {"children": {"3": '
        '{"value": "Failure", "children": {"Memory": {"value": "Failure", "children": {"Error": {"value": "DBE on GPU 3"}}}}},'
        '"4": {"value": "Healthy"}, "5": {"value": "Warning", "children": {}}}}}}'
    )
    found = site.look_dcgm(program(tmp_path, f"cat <<'X'\n{report}\nX"))
    assert [(each.part, each.severity, each.reason) for each in found] == [
        ("GPU/3/Memory", "error", "DBE on GPU 3"),
        ("GPU/5", "warning", "Warning"),
    ]
    (odd,) = site.look_dcgm(program(tmp_path, "echo Error: unable to connect; exit 1"))
    assert (odd.severity, "unable to connect" in odd.reason) == ("warning", True)


def test_programs_of_the_site_are_checks(tmp_path: Path) -> None:
    folder = tmp_path / "health.d"
    folder.mkdir()
    program(folder, "echo licence server is away; exit 1", name="licence")
    program(folder, "exit 0", name="fine")
    (folder / "README").write_text("no program")
    checks = [check for check in site.checks(folder) if check.name not in ("nhc", "dcgmi")]
    checked, findings = run(checks)
    assert set(checked) >= {"site.licence", "site.fine"}
    assert [(each.check, each.severity, each.reason) for each in findings] == [
        ("site.licence", "error", "licence server is away")
    ]
