"""Starts processes and lets none of them, nor of what they start, outlive it: `python -m tests.slurm.keeper`.

Contract: a line of JSON on standard input, {"argv", "env", "log"}, starts a process and is answered by one line, {"pid"} or
{"error"}. At the end of standard input, so also when whoever holds the other end is killed, everything below this process is
killed with SIGKILL, and then it ends. It is the subreaper of all of it: what daemonizes or loses its parent stays in its tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
#: The kernel frees what a killed process held before it is gone.
KILL_TIMEOUT_S = 20.0

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
    _kill_all()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"pid": _start(request["argv"], request["env"], request["log"])}
    except OSError as error:
        return {"error": f"{request['argv'][0]}: {error}"}


def _start(argv: list[str], env: dict[str, str], log: str) -> int:
    """Raises OSError."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    silence = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _become(argv, env, silence, output)
        return pid
    finally:
        os.close(output)
        os.close(silence)


def _become(argv: list[str], env: dict[str, str], silence: int, output: int) -> None:
    """In the child; never returns."""
    try:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(silence, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir("/")
        os.execvpe(argv[0], argv, env)
    except BaseException as error:
        os.write(2, f"{argv[0]} not started: {error}\n".encode())
    os._exit(127)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _kill_all() -> None:
    """Again and again: what is killed may just have started something."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap()
        if time.monotonic() > deadline:
            print(f"left behind: {below}", file=sys.stderr, flush=True)
            sys.exit(1)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
