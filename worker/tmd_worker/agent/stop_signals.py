"""What a signal to the agent means: the ranks get it; a second request to stop kills them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

#: Requests to stop, as torchrun takes them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
#: From the first request to stop until SIGKILL.
STOP_GRACE_S = 30.0
#: A repetition this soon is the same request: timeout(1) and some launchers signal the process and then its group.
REPEAT_S = 0.25


class StopSignals:
    """Installed for the life of the event loop. `stopped` becomes the first stop signal."""

    def __init__(self, signal_all: Callable[[int], None], say: Callable[[str], None]) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.stopped: asyncio.Future[signal.Signals] = loop.create_future()
        self._signal_all = signal_all
        self._say = say
        self._first_s = 0.0
        for signum in STOP_SIGNALS:
            if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(signum, self._stop, signum)
        for signum in PASSED_ON:
            loop.add_signal_handler(signum, signal_all, signum)

    def ignore_from_now(self) -> None:
        """The ranks are gone: a late signal must not replace the job's exit code by its own."""
        for signum in (*STOP_SIGNALS, *PASSED_ON):
            self._loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_IGN)

    def _stop(self, signum: signal.Signals) -> None:
        if self.stopped.done():
            if time.monotonic() - self._first_s < REPEAT_S:
                return
            self._say(f"{signum.name} again: the ranks are killed")
            self._signal_all(signal.SIGKILL)
            return
        self.stopped.set_result(signum)
        self._say(f"{signum.name}: passed on to the ranks, which have {STOP_GRACE_S:.0f} s to end (a second one kills them)")
        if not (signum in (signal.SIGINT, signal.SIGQUIT) and _typed_at_terminal()):
            self._signal_all(signum)
        self._first_s = time.monotonic()  # a repetition may have come while this was done


def _typed_at_terminal() -> bool:
    """In the foreground of a terminal, Ctrl-C reaches the ranks too: they share the agent's process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def exit_status(code: int) -> int:
    """An exit code as in `subprocess` as a shell shows it: 128 + n for a signal."""
    return 128 - code if code < 0 else min(code, 255)
