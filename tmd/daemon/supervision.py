"""The daemon's parts as tasks of which none can end unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tmd.ledger.errors import LedgerTakenOver

log = logging.getLogger("tmd.daemon")


class PartBroke(RuntimeError):
    """A part that the daemon cannot do without has ended while the daemon ran; the log has the traceback."""


@contextlib.asynccontextmanager
async def supervised(name: str, part: Coroutine[Any, Any, None], failed: asyncio.Future[None]) -> AsyncIterator[None]:
    """The part as a task, cancelled at the end. If it breaks or ends before, `failed` gets PartBroke (or LedgerTakenOver): the
    daemon is to end then, and the next one starts from the ledger."""

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled() or failed.done():
            return
        error = task.exception() or RuntimeError("it ended unasked")
        log.critical("%s broke, the daemon ends; jobs go on: %s", name, error, exc_info=error)
        failed.set_exception(error if isinstance(error, LedgerTakenOver) else PartBroke(f"{name}: {error!r}"))

    task = asyncio.create_task(part, name=name)
    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
