"""The book of a local cluster and its file, also while the disk takes nothing.

Contract: a *decision* (a drain, a kill, a new job) counts once it is written; if it cannot be, all is as it was before. A *fact*
(an agent's pid, its end) is true whether it is written or not: it is kept, and written as soon as the disk takes it. What is in
the way is logged once when it begins and once when it is over.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tmd.nodes.base import NotRecorded
from tmd.nodes.local_state import Book

log = logging.getLogger(__name__)

#: What could not be written is tried again after this long.
RETRY_S = 1.0


class Record:
    """`changed` is called after every change, written or not."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self.path = path
        self.book = Book()
        self._changed = changed
        self._retry_s = 0.0
        self._failing_since_s: float | None = None

    def load(self) -> None:
        """What an earlier daemon left. Raises ValueError if that cannot be read."""
        self.book = Book.load(self.path)

    @contextlib.contextmanager
    def decision(self, not_done: str, *parts: msgspec.Struct) -> Iterator[None]:
        """Writes the fields of `parts` that the body sets. If that fails they are set back and NotRecorded is raised, with
        `not_done` as what has not been done."""
        before = [(part, msgspec.structs.asdict(part)) for part in parts]
        try:
            yield
            self._write()
        except BaseException as error:
            for part, fields in before:
                for name, value in fields.items():
                    setattr(part, name, value)
            if not isinstance(error, OSError):
                raise
            raise NotRecorded(
                f"{not_done}: {self.path} cannot be written ({error.strerror or error}), and nothing is done before it is",
                "free space there or repair that disk, then ask again",
            ) from None
        self._changed()

    def note(self) -> None:
        """Writes facts that have come up; if that fails, `catch_up` will."""
        with contextlib.suppress(OSError):
            self._write()
        self._changed()

    def catch_up(self) -> None:
        """For somebody who calls often: where writing has failed, it is tried again every RETRY_S."""
        if self._failing_since_s is not None and time.monotonic() >= self._retry_s:
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        """Everything as it is now. Raises OSError."""
        try:
            self.book.save(self.path)
        except OSError as error:
            self._retry_s = time.monotonic() + RETRY_S
            if self._failing_since_s is None:
                self._failing_since_s = time.monotonic()
                log.error(
                    "%s cannot be written: %s; agents are watched as before, nothing new is done to local nodes; free space "
                    "there or repair that disk; trying again every %g s",
                    self.path,
                    error.strerror or error,
                    RETRY_S,
                )
            raise
        if self._failing_since_s is not None:
            log.info("%s is written again, after %.1f s", self.path, time.monotonic() - self._failing_since_s)
            self._failing_since_s = None
