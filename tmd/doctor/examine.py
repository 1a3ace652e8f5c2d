"""All checks of an installation, side by side, each with a deadline of its own."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from tmd.config import Config
from tmd.doctor import (
    asking,
    clock,
    daemon,
    machine,
    munge,
    slurm_parameters,
    slurm_plugins,
    slurm_pool,
    slurm_rights,
    slurm_version,
)
from tmd.doctor.facts import DaemonFacts, Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, skipped

Check = Callable[[Facts], Iterable[Finding]]
CheckOfSlurm = Callable[[Facts, SlurmFacts], Iterable[Finding]]
#: Of one check, beside the deadlines of what it asks. A file system that hangs has no other.
CHECK_TIMEOUT_S = 30.0
#: Slurm is asked five things in a row, each with `query_timeout_s`, and pyslurm has to be loaded.
SLURM_QUESTIONS = 5
PYSLURM_S = 20.0

_Answer = TypeVar("_Answer")

_OF_SLURM: Mapping[str, CheckOfSlurm] = {
    "slurm": slurm_version.check_version,
    "growth": slurm_pool.check_growth,
    "pool": slurm_pool.check_pool,
    "job submit": slurm_plugins.check_job_submit,
    "spank": slurm_plugins.check_spank,
    "events": slurm_plugins.check_events,
    "parameters": slurm_parameters.check_parameters,
    "rights": slurm_rights.check_rights,
    "hints": machine.check_hint_socket,
    "clock": clock.check_clock,
}


def examine(config: Config, path: Path) -> list[Finding]:
    """All findings, in a fixed order. `path` is the daemon's socket."""
    settings = config.slurm
    with_slurm = config.daemon.resource_manager == "slurm"
    slurm_timeout_s = SLURM_QUESTIONS * settings.query_timeout_s + PYSLURM_S
    asked = _started(lambda: asking.ask_slurm(settings) if with_slurm else None)
    said = _outcome("daemon", _started(functools.partial(asking.ask_daemon, path)), CHECK_TIMEOUT_S)
    slurm = _outcome("slurm", asked, slurm_timeout_s)
    facts = Facts(
        config,
        said if isinstance(said, DaemonFacts) else None,
        slurm if isinstance(slurm, SlurmFacts) else None,
    )
    findings = [said] if isinstance(said, Finding) else [ok("daemon", f"answers on {path}")]
    if isinstance(slurm, Finding):
        findings.append(slurm)
        points = ", ".join(name for name in _OF_SLURM if name not in ("slurm", "events"))
        findings.append(skipped("slurm", f"not looked at, as Slurm does not answer: {points}"))
    findings += run_all(facts, _checks(path, facts.slurm))
    if not with_slurm:
        seen = f"not looked at: resource_manager is {config.daemon.resource_manager}, so there are no checks of Slurm"
        findings.append(skipped("slurm", seen))
    return findings


def _checks(path: Path, slurm: SlurmFacts | None) -> dict[str, Check]:
    return {
        "daemon": daemon.check_daemon,
        "state directory": machine.check_state_dir,
        "socket": functools.partial(machine.check_socket, path=path),
        "port": machine.check_port,
        "munge": munge.check_munge,
        **({} if slurm is None else {name: _of_slurm(check, slurm) for name, check in _OF_SLURM.items()}),
        "standbys": daemon.check_standbys,
    }


def _of_slurm(check: CheckOfSlurm, slurm: SlurmFacts) -> Check:
    return lambda facts: check(facts, slurm)


def run_all(facts: Facts, checks: Mapping[str, Check]) -> list[Finding]:
    running = {name: _started(functools.partial(_run, check, facts)) for name, check in checks.items()}
    deadline = time.monotonic() + CHECK_TIMEOUT_S + facts.config.slurm.query_timeout_s
    findings: list[Finding] = []
    for name, future in running.items():
        outcome = _outcome(name, future, max(0.0, deadline - time.monotonic()))
        findings += [outcome] if isinstance(outcome, Finding) else outcome
    return findings


def _run(check: Check, facts: Facts) -> list[Finding]:
    return list(check(facts))


def _outcome(point: str, future: concurrent.futures.Future[_Answer], timeout_s: float) -> _Answer | Finding:
    """Its answer, or a finding if there is none in time, or a file or program stands in the way that no check expects."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        return fault(point, "the check has not come to an end in time", "is a file system or a program of this machine stuck?")
    except OSError as error:
        return fault(point, f"could not be looked at: {error}", "run this as root on the head node")


def _started(function: Callable[[], _Answer]) -> concurrent.futures.Future[_Answer]:
    """In a thread that nobody waits for, not even the end of the process."""
    future: concurrent.futures.Future[_Answer] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return future
