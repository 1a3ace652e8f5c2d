"""`tmd-run` as the first process of a container: what the kernel asks of that process, and of no other.

A pid namespace hands its first process every orphan to bury, shields it from signals that it does not handle, and ends with it.
Contract: the agent never is that process; it is its child, and all that the agent can count on elsewhere holds there, too.
"""

from __future__ import annotations

import os
import signal

from tmd_worker.agent.stop_signals import PASSED_ON, STOP_SIGNALS

_FIRST_PID = 1


def step_aside() -> None:
    """Returns in a process that is not the first of its pid namespace. If this one was, it stays behind, passes signals on, reaps
    what nobody else does, and ends with the exit code of its child (128 + n for signal n), which ends the container."""
    if os.getpid() != _FIRST_PID:
        return
    awaited = {signal.SIGCHLD, *STOP_SIGNALS, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # the kernel drops none that is blocked
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_attend(agent, awaited))


def _attend(agent: int, awaited: set[signal.Signals]) -> int:
    """For as long as the agent lives; returns its exit code."""
    while True:
        signum = signal.sigwait(awaited)
        if signum != signal.SIGCHLD:
            os.kill(agent, signum)  # not reaped yet, so it is still its pid
            continue
        ended = _reap()
        if agent in ended:
            code = os.waitstatus_to_exitcode(ended[agent])
            return 128 - code if code < 0 else code


def _reap() -> dict[int, int]:
    """pid -> wait status of every child that has ended."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
