"""A process that writes a ledger as fast as it can and says what was acknowledged: to be killed.

    python -m tests.daemon.ledger_writer DATABASE_URL

For each line on standard input a child is forked (so that the next life does not wait for imports): it opens the ledger, writes
round after round, and prints "began PID", then the number of each round once the ledger has acknowledged it, then "ended" when it
is no more. A round n is one transaction: job j1 in epoch n, migration m<n>, events 2n-1 and 2n, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.daemon import records
from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger.ledger import Ledger


def round_of(number: int) -> Persist:
    return Persist(
        jobs=(records.job(epoch=number, reason="r" * (number % 7) * 1000),),
        migrations=(records.migration(migration_id=f"m{number}", attempt=number),),
        events=(records.event(2 * number - 1), records.event(2 * number, cause=2 * number - 1)),
    )


async def write(database_url: str) -> None:
    """Until the process is killed, or nobody listens."""
    ledger = await Ledger.open(database_url)
    job = await ledger.job("j1")
    number = job.epoch if job is not None else 0
    while True:
        number += 1
        await ledger.write(round_of(number), [ReleaseNode("j1", f"n{number}", "replaced")])
        os.write(1, f"{number}\n".encode())  # in one piece: it may be killed after each


def main() -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            print(f"began {os.getpid()}", flush=True)
            asyncio.run(write(sys.argv[1]))
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
