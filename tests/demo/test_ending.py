"""A program that is told to end does so once, and not in the middle of what must be done as a whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PROGRAM = """
import time
from tmd.demo.ending import end_as_on_ctrl_c, uninterrupted

def say(word):
    print(word, flush=True)

end_as_on_ctrl_c()
try:
    {body}
except KeyboardInterrupt:
    say("interrupted")
    for _ in range(50):
        time.sleep(0.01)
    say("ended")
"""


@contextmanager
def program(body: str, *, ignoring: signal.Signals | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    before = signal.signal(ignoring, signal.SIG_IGN) if ignoring else None
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        if ignoring:
            signal.signal(ignoring, before)
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_break_off_the_ending(first: signal.Signals) -> None:
    with program("say('begun'); time.sleep(60)") as process:
        assert said(process) == "begun"
        process.send_signal(first)
        assert said(process) == "interrupted"
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, first):
            process.send_signal(again)
        assert said(process) == "ended"
        assert process.wait(60) == 0


def test_what_is_uninterrupted_is_done_as_a_whole_and_nothing_after_it() -> None:
    body = """
    with uninterrupted():
        say('begun')
        for _ in range(50):
            time.sleep(0.01)
        say('done')
    say('never')
"""
    with program(body) as process:
        assert said(process) == "begun"
        process.terminate()
        assert [said(process) for _ in range(3)] == ["done", "interrupted", "ended"]
        assert process.wait(60) == 0


def test_what_was_ignored_from_the_start_stays_ignored() -> None:
    """As by nohup, and by a shell for what it runs in the background."""
    with program("say('begun'); time.sleep(0.2); say('not interrupted')", ignoring=signal.SIGHUP) as process:
        assert said(process) == "begun"
        process.send_signal(signal.SIGHUP)
        assert said(process) == "not interrupted"
        assert process.wait(60) == 0
