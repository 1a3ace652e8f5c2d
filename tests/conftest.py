"""What holds for every test."""

from __future__ import annotations

import signal

# Started in the background or by nohup, the tests would ignore these, and so would every program that they start and tell to end.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
