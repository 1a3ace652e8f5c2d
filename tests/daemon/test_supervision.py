"""No part of the daemon ends without a word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tmd.daemon.supervision import PartBroke, supervised
from tmd.ledger.errors import LedgerTakenOver


async def ends() -> None:
    """Unasked."""


async def breaks() -> None:
    raise KeyError("n1")


async def is_taken_over() -> None:
    raise LedgerTakenOver("generation 2 has started")


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        (ends, PartBroke, "nodes: .*it ended unasked"),
        (breaks, PartBroke, "nodes: KeyError"),
        (is_taken_over, LedgerTakenOver, "generation 2"),
    ],
)
async def test_a_part_that_ends_ends_the_daemon_and_is_logged(
    part: Callable[[], Coroutine[Any, Any, None]], error: type[Exception], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with supervised("nodes", part(), failed):
        with pytest.raises(error, match=words):
            await asyncio.wait_for(failed, 5)
    assert [(record.levelno, "nodes broke" in record.message) for record in caplog.records] == [(logging.CRITICAL, True)]


async def test_a_part_that_is_stopped_has_not_broken() -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with supervised("nodes", asyncio.sleep(600), failed):
        pass
    assert not failed.done()
