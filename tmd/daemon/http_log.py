"""What is logged of clients that send something else than HTTP: whoever reaches a listener must not be able to fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

#: One line in this time, with the number of those that were held back.
QUIET_S = 60.0
_SHOWN_CHARACTERS = 160


class ClientMistakes(logging.Filter):
    """For the logger of aiohttp's server: a client's mistake is a warning without traceback, now and then. The rest passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._quiet_until_s = 0.0
        self._held_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return True
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            self._held_back += 1
            return False
        more = f"; {self._held_back} more like it since the last such line" if self._held_back else ""
        self._quiet_until_s, self._held_back = now_s + QUIET_S, 0
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        record.msg, record.args = "a client sent what is not HTTP, it was turned away: %s%s", (_in_one_line(error), more)
        record.exc_info = record.exc_text = None
        return True


class OutOfDescriptors(logging.Filter):
    """For asyncio's logger, which tells a thousand times a second that no connection can be taken. The rest passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._quiet_until_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("socket.accept() out of system resource"):
            return True
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            return False
        self._quiet_until_s = now_s + QUIET_S
        record.msg, record.args = (
            "no connection can be taken: this process may have no more open files; raise LimitNOFILE in the unit (ulimit -n)",
            (),
        )
        record.exc_info = record.exc_text = None
        return True


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_SHOWN_CHARACTERS]


_MISTAKES = ClientMistakes()
_DESCRIPTORS = OutOfDescriptors()


def quiet_http() -> None:
    """From now on, for all listeners of this process."""
    logging.getLogger("aiohttp.server").addFilter(_MISTAKES)
    logging.getLogger("asyncio").addFilter(_DESCRIPTORS)
