"""Checks side by side, each in a process of its own with a deadline of its own.

A check may hang where nothing can wake it (a dead file server): its process is killed, and if even that does not end it, it is
left behind. It holds none of the descriptors that whoever started us waits for.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from tmd.protocol.health import Finding

#: All checks together: Slurm kills a health check after 60 s, and the report has to be sent.
TOTAL_S = 45.0
#: What one check may say.
ANSWER_LIMIT_BYTES = 1 << 20

_ANSWER = msgspec.json.Decoder(tuple[Finding, ...])


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One look at the node. `name` is for people; `covers` are the checks (Finding.check) that it answers for."""

    name: str
    covers: tuple[str, ...]
    look: Callable[[], Sequence[Finding]]
    timeout_s: float = 10.0


@dataclasses.dataclass(slots=True)
class _Running:
    check: Check
    pid: int
    descriptor: int
    deadline_s: float
    said: bytearray = dataclasses.field(default_factory=bytearray)


def run(checks: Sequence[Check], total_s: float = TOTAL_S) -> tuple[list[str], list[Finding]]:
    """What was looked at to the end (Finding.check), and what was found. A check that breaks or does not end is a finding."""
    end_s = time.monotonic() + total_s
    checked: list[str] = ["health.deadline", "health.broken"]
    findings: list[Finding] = []
    with selectors.DefaultSelector() as selector:
        for each in checks:
            started = _start(each, end_s)
            selector.register(started.descriptor, selectors.EVENT_READ, started)
        while selector.get_map():
            now_s = time.monotonic()
            waiting: list[_Running] = [key.data for key in selector.get_map().values()]
            for ready, _ in selector.select(max(0.0, min(each.deadline_s for each in waiting) - now_s)):
                running: _Running = ready.data
                if _read(running):
                    continue
                selector.unregister(running.descriptor)
                answered, found = _outcome(running)
                checked += answered
                findings += found
            for running in [key.data for key in list(selector.get_map().values()) if time.monotonic() >= key.data.deadline_s]:
                selector.unregister(running.descriptor)
                findings.append(_overdue(running))
    return checked, findings


def _start(check: Check, end_s: float) -> _Running:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be(check, writer)
    os.close(writer)
    return _Running(check, pid, reader, min(end_s, time.monotonic() + check.timeout_s))


def _be(check: Check, writer: int) -> None:
    """The process of one check; never returns."""
    code = 1
    try:
        os.setsid()  # what it starts ends with it
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            said = msgspec.json.encode(tuple(check.look()))
        except Exception as error:
            said = f"!{type(error).__name__}: {error}".encode(errors="replace")
        while said:
            said = said[os.write(writer, said) :]
        code = 0
    finally:
        os._exit(code)


def _read(running: _Running) -> bool:
    """False at the end of what it says."""
    part = os.read(running.descriptor, 65536)
    running.said += part
    return bool(part) and len(running.said) <= ANSWER_LIMIT_BYTES


def _outcome(running: _Running) -> tuple[tuple[str, ...], list[Finding]]:
    """Which checks it answers for, and what it has found."""
    _end(running)
    check = running.check
    if not running.said.startswith(b"!"):
        try:
            return check.covers, list(_ANSWER.decode(running.said))
        except msgspec.DecodeError:
            running.said[:] = b"!it died"
    why = running.said[1:300].decode(errors="replace")
    broken = Finding(check="health.broken", severity="warning", part=check.name, reason=f"the check itself failed: {why}")
    return (), [broken]


def _overdue(running: _Running) -> Finding:
    _end(running)
    return Finding(
        check="health.deadline",
        severity="error",
        part=running.check.name,
        reason=f"the check did not end within {running.check.timeout_s:g} s: what it looks at hangs, or the node is overloaded",
    )


def _end(running: _Running) -> None:
    """Kills what is left of it, and takes its exit if that comes at once: one that hangs in the kernel is not waited for."""
    os.close(running.descriptor)
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(running.pid, signal.SIGKILL)  # not yet, or no more, the leader of its group
    deadline_s = time.monotonic() + 0.5
    while os.waitpid(running.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
        time.sleep(0.005)
