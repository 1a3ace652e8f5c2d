"""Calls of libmunge with a deadline, off the event loop.

libmunge cannot be interrupted: a call that is given up on runs to its own end (some 10 s) in a thread that nobody waits for,
not even the end of the process. Of such threads there are CALLS_LIMIT at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from tmd.munge.library import MungeDown

#: munged answers within a millisecond.
TIMEOUT_S = 5.0
CALLS_LIMIT = 64

_Answer = TypeVar("_Answer")
_free_calls = threading.BoundedSemaphore(CALLS_LIMIT)


def call(function: Callable[[], _Answer], *, timeout_s: float = TIMEOUT_S) -> _Answer:
    """The function's answer, or what it raises. Raises MungeDown when the time is up."""
    try:
        return _started(function).result(timeout_s)
    except TimeoutError:
        raise _no_answer(timeout_s) from None


async def call_aside(function: Callable[[], _Answer], *, timeout_s: float = TIMEOUT_S) -> _Answer:
    """As `call`, for the event loop."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(_started(function))
    except TimeoutError:
        raise _no_answer(timeout_s) from None


def _started(function: Callable[[], _Answer]) -> concurrent.futures.Future[_Answer]:
    """Raises MungeDown if too many calls hang already."""
    if not _free_calls.acquire(blocking=False):
        raise MungeDown(f"{CALLS_LIMIT} calls of munge are without an answer", "look at munged: systemctl status munge")
    future: concurrent.futures.Future[_Answer] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)
        finally:
            _free_calls.release()

    threading.Thread(target=run, name="munge", daemon=True).start()
    return future


def _no_answer(timeout_s: float) -> MungeDown:
    return MungeDown(f"munged did not answer within {timeout_s:g} s", "look at it: systemctl status munge")
