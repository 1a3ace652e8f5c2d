"""`tmctl ledger prune`: what ended long ago goes whole, what live jobs need stays, a running daemon does not notice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from tests.daemon import records
from tmd.cli.ledger import DAY_S
from tmd.cli.main import main
from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger.check import check
from tmd.ledger.ledger import Ledger, StoreChange
from tmd.ledger.prune import prune

NOW_S = 1000 * DAY_S
LONG_AGO_S = NOW_S - 100 * DAY_S
LATELY_S = NOW_S - 10 * DAY_S
#: What is older goes.
BEFORE_S = NOW_S - 30 * DAY_S


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    """A daemon's, which goes on. Its jobs: one that runs since long, two that ended long ago, one of which still owes a node,
    and one that has ended lately."""
    opened = await Ledger.open(database_url)
    await opened.write(records.whole_job("runs", first_event=1))
    await opened.write(records.whole_job("ended", first_event=11, ended_s=LONG_AGO_S))
    await opened.write(records.whole_job("owes", first_event=21, ended_s=LONG_AGO_S), [ReleaseNode("owes", "n1", "over")])
    await opened.write(records.whole_job("lately", first_event=31, ended_s=LATELY_S))
    await opened.write_store(StoreChange({("ended", "key"): b"v", ("runs", "key"): b"v"}, {("ended", "ended.0", 1): b"r"}))
    yield opened
    await opened.close()


async def contents(ledger: Ledger) -> tuple[object, ...]:
    stores = [await ledger.store_contents(job_id) for job_id in ("runs", "ended")]
    return await ledger.load_snapshot(), await ledger.events(), await ledger.pending_releases(), stores


async def test_what_ended_long_ago_goes_whole_and_the_rest_stays_sound(ledger: Ledger, database_url: str) -> None:
    pruned = await prune(database_url, before_s=BEFORE_S, dry_run=False)
    assert pruned.jobs == ("ended",)
    expected = {"jobs": 1, "ranks": 4, "nodes": 1, "migrations": 1, "events": 4, "store": 1, "store_replies": 1}
    assert pruned.rows == expected
    snapshot = await ledger.load_snapshot()
    assert {job.job_id for job in snapshot.jobs} == {"runs", "owes", "lately"}
    assert {event.job_id for event in await ledger.events()} == {"runs", "owes", "lately"}
    assert await ledger.store_contents("runs") == ({"key": b"v"}, {})
    assert (await check(database_url)).problems == []
    assert (await prune(database_url, before_s=BEFORE_S, dry_run=False)).rows == {}, "nothing is left to do"


async def test_a_dry_run_says_the_same_and_does_nothing(ledger: Ledger, database_url: str) -> None:
    before = await contents(ledger)
    told = await prune(database_url, before_s=BEFORE_S, dry_run=True)
    assert await contents(ledger) == before
    assert await prune(database_url, before_s=BEFORE_S, dry_run=False) == told


async def test_the_daemon_goes_on_in_its_generation(ledger: Ledger, database_url: str) -> None:
    writes = asyncio.gather(*(ledger.write(Persist(paused=bool(number % 2))) for number in range(20)))
    await prune(database_url, before_s=BEFORE_S, dry_run=False)
    await writes
    following = await Ledger.open(database_url)
    assert following.generation == ledger.generation + 1
    await following.close()


async def test_what_led_to_an_event_that_stays_is_kept(ledger: Ledger, database_url: str) -> None:
    """A chain through a job that goes, and through what is no job's, up to an event of a job that runs."""
    chain = (
        records.event(41, cause=12, subject="tmd", job_id=""),
        records.event(42, cause=41, subject="ended", job_id="ended"),
        records.event(43, cause=42, subject="runs", job_id="runs"),
        records.event(44, subject="tmd", job_id=""),
        records.event(45, subject="tmd", job_id=""),
        records.event(46, subject="gone", job_id="gone"),
        records.event(47, subject="gone", job_id="gone"),
    )
    await ledger.write(Persist(events=chain))
    await prune(database_url, before_s=BEFORE_S, dry_run=False)
    left = [event.event_id for event in await ledger.events()]
    assert left == [1, 2, 3, 4, 11, 12, 21, 22, 23, 24, 31, 32, 33, 34, 41, 42, 43, 45, 47]
    assert [event.event_id for event in await ledger.story("ended")] == [11, 12, 41, 42], "of 44 and 45 only the last word stays"
    assert (await check(database_url)).problems == []


async def test_numbers_of_events_are_never_given_out_again(database_url: str) -> None:
    ledger = await Ledger.open(database_url)
    await ledger.write(records.whole_job("ended", first_event=1, ended_s=LONG_AGO_S))
    await prune(database_url, before_s=BEFORE_S, dry_run=False)
    snapshot = await ledger.load_snapshot()
    assert (snapshot.jobs, snapshot.last_event_id) == ((), 4)
    assert (await check(database_url)).problems == []
    await ledger.close()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["ledger", "prune", *arguments])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_command_says_what_it_removed(database_url: str) -> None:
    ledger = await Ledger.open(database_url)
    await ledger.write(records.whole_job("ended", first_event=1, ended_s=time.time() - 40 * DAY_S))
    await ledger.close()

    async def prune_command(*arguments: str) -> str:
        result = await asyncio.to_thread(call, "--database", database_url, *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    rows = "4 ranks, 1 nodes, 1 migrations, 1 jobs"
    assert await prune_command("--older-than", "41") == "nothing ended more than 41 days ago: nothing removed\n"
    assert await prune_command("--older-than", "39", "--dry-run") == f"would be removed: {rows}\njobs: ended\n"
    answer = json.loads(await prune_command("--older-than", "39", "--json"))
    assert (answer["jobs"], answer["dry_run"], answer["older_than_days"]) == (["ended"], False, 39.0)
    assert await prune_command("--older-than", "39") == "nothing ended more than 39 days ago: nothing removed\n"


def test_less_than_a_day_is_refused() -> None:
    """The daemon may still have to tell the agents of a job how it ended."""
    result = call("--older-than", "0.5")
    assert result.exit_code == 2
    assert "x>=1" in result.stderr
