"""A ledger's database without the ledger: for tests that do to it what tmd never would."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from tmd.ledger.engine import connect, parse_url

Result = TypeVar("Result")


async def change(database_url: str, work: Callable[[Connection], Result]) -> Result:
    """What `work` returns, once its transaction is committed."""
    database = connect(parse_url(database_url))
    try:
        return await database.writer.run(work)
    finally:
        await database.close()
