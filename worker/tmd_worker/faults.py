"""Deterministic faults for tests: named points in the code at which a process dies, stops, loses a link or raises.

Armed by two environment variables, otherwise every point is an empty function:
- TMD_FAULTS: a JSON list of {"incarnation" or "rank", "step", "point", "action", "count", "when"}. What is left out matches
  everything; `action` is one of kill, stop, close_link, exit, raise; the fault fires when its point is passed for the
  `count`-th time (default 1).
- TMD_FAULTS_DIR: a directory in which a fault that has fired leaves a marker, so that each fires once per job and a
  replacement does not die again. A fault with `when` sleeps until a file of that name is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Literal

import msgspec

#: Exit code of the action `exit`.
EXIT_FAULT = 41

Action = Literal["kill", "stop", "close_link", "exit", "raise"]


class FaultRaised(RuntimeError):
    """The action `raise` of an armed fault."""


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of TMD_FAULTS. None matches everything."""

    point: str
    action: Action
    incarnation: str | None = None
    rank: int | None = None
    step: int | None = None
    count: int = 1
    when: str | None = None
    #: How often the point was passed so far.
    passed: int = 0


#: Who this process is and where it stands; set by the session.
incarnation: str = ""
rank: int | None = None
step: int = -1
#: What the action `close_link` calls; set by the fabric.
close_link: Callable[[], None] | None = None

_faults: list[Fault] = []
_lock = threading.Lock()


def point(name: str) -> None:
    """A place where a fault may fire. Does nothing unless one is armed for it."""
    if _faults:
        _pass(name)


def armed(name: str) -> bool:
    """True if some fault of this process and step waits at `name`, so that the caller takes the path it needs."""
    return bool(_faults) and any(_matches(fault, name) for fault in _faults)


def none_armed() -> bool:
    """True if no fault can fire in this process, so that points may be left out."""
    return not _faults


def arm(text: str) -> None:
    """Reads TMD_FAULTS. Raises msgspec.ValidationError for a fault that makes no sense."""
    _faults[:] = msgspec.json.decode(text, type=list[Fault])


def _matches(fault: Fault, name: str) -> bool:
    return (
        fault.point == name
        and fault.incarnation in (None, incarnation)
        and fault.rank in (None, rank)
        and fault.step in (None, step)
        and (fault.when is None or os.path.exists(os.path.join(os.environ["TMD_FAULTS_DIR"], fault.when)))
    )


def _pass(name: str) -> None:
    for number, fault in enumerate(_faults):
        if not _matches(fault, name):
            continue
        with _lock:
            fault.passed += 1
            due = fault.passed == fault.count and _claim(number)
        if due:
            _fire(fault)


def _claim(number: int) -> bool:
    """True for the first process of the job that asks."""
    directory = os.environ.get("TMD_FAULTS_DIR")
    if directory is None:
        return True
    try:
        marker = os.open(os.path.join(directory, f"fault-{number}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    os.write(marker, json.dumps({"pid": os.getpid(), "incarnation": incarnation, "rank": rank, "step": step}).encode())
    os.close(marker)
    return True


def _fire(fault: Fault) -> None:
    print(f"tmd: fault at {fault.point}, step {step}: {fault.action}", file=sys.stderr, flush=True)
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        # Sent to this thread, or it would go on until another one has taken the signal. It stops the whole process.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif fault.action == "exit":
        os._exit(EXIT_FAULT)
    elif fault.action == "close_link":
        if close_link is not None:
            close_link()
    else:
        raise FaultRaised(f"fault injected at {fault.point}, step {step}")


if "TMD_FAULTS" in os.environ:
    arm(os.environ["TMD_FAULTS"])
